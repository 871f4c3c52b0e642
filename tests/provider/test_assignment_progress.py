"""Records of a report, and their limits."""

from ravnest.provider.assignment_progress import MOST_REPORTED_TEXT, AssignmentProgress, RecordLog
from ravnest.telemetry import WarningRecord


def test_a_report_has_a_limited_length() -> None:
    long = WarningRecord("x" * 3000)
    log = RecordLog(records=[long] * 1000)
    reported = 0
    while log.waiting:
        first, records = log.next()
        assert first == reported
        assert 0 < sum(len(each.message) for each in records) <= MOST_REPORTED_TEXT  # type: ignore[union-attr]
        reported += len(records)
        log.acknowledge(reported)
    assert reported == 1000
    assert len(RecordLog(records=[WarningRecord("x" * 2 * MOST_REPORTED_TEXT)]).next()[1]) == 1
    assert len(RecordLog(records=[long] * 1000).unacknowledged(2000)[1]) == 1000


def test_an_end_is_reported_with_the_last_records() -> None:
    for phase, before in (("finished", "uploading"), ("failed", "training")):
        records = RecordLog(records=[WarningRecord("x" * MOST_REPORTED_TEXT)] * 2)
        progress = AssignmentProgress(
            "a", phase, is_root=True, failure="the loss is nan", records=records
        )
        assert progress.report().phase == before, "there are records that the server would not take"
        records.acknowledge(1)
        assert (progress.report().phase, progress.report().reason) == (phase, "the loss is nan")
