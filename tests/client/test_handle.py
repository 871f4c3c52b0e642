"""``JobHandle`` against a real server: waiting, the trained model, and jobs that end without one."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from job_server import (
    JobServer,
    RecordingTransport,
    ScriptedProvider,
    in_background,
    loss_record,
    small_job,
    validation_record,
)

from ravnest.client import handle as handles
from ravnest.client.handle import JobHandle
from ravnest.errors import JobEndedError, ServerRefusedError
from ravnest.http.retry import RetryPolicy
from ravnest.schemas.jobs import JobState, JobView
from ravnest.telemetry import LossRecord, SpansRecord, ValidationRecord, WarningRecord, WorkerRecord
from ravnest.tracing.spans import SpanKind, TraceSpan, flattened


@pytest.fixture
def server(shared_server: JobServer) -> Iterator[JobServer]:
    yield shared_server
    shared_server.cancel_jobs()


@pytest.fixture
def handle(server: JobServer) -> Iterator[JobHandle]:
    with JobHandle(server.submit(), server.requester.api()) as made:
        yield made


@pytest.fixture
def provider(server: JobServer, handle: JobHandle) -> Iterator[ScriptedProvider]:
    """A provider that has the only stage of the handle's job."""
    with server.provider() as made:
        assert made.take_assignment().job == handle.id
        yield made


def test_the_trace_of_a_running_job_has_the_answers_of_its_nodes(
    handle: JobHandle, provider: ScriptedProvider
) -> None:
    provider.report("training", SpansRecord(_forward(0)))

    def answer() -> None:
        order = provider.await_trace_order()
        provider.report("training", SpansRecord(_forward(0)), SpansRecord(_forward(1), order))

    with in_background(answer):
        events = handle.trace()["traceEvents"]
    shown = [each["args"]["micro-batch"] for each in events if each["ph"] == "X"]
    assert shown == [0, 1], "spans that were sent twice are shown once"


def _forward(index: int) -> tuple[int, ...]:
    return flattened([TraceSpan(SpanKind.FORWARD, 10 + 100 * index, 50, 0, 0, index)])


def test_the_handle_shows_what_the_server_knows(handle: JobHandle, provider: ScriptedProvider) -> None:
    assert handle.state() is JobState.SHIPPING
    provider.report("training", loss_record(0, 2.0), loss_record(1, 1.0), validation_record(0, 0.5))
    assert handle.state() is JobState.TRAINING
    progress = handle.progress()
    assert (progress.updates, progress.loss, progress.validation) == (2, 1.0, 0.5)
    assert handle.losses().losses == (2.0, 1.0)
    assert handle.losses(1).losses == (1.0,)
    events = handle.events()
    assert [event.after for event in events if event.kind == "job"][-1] == JobState.TRAINING
    assert handle.events(after=events[1].sequence) == events[2:]
    assert handle.id in repr(handle)


def test_requests_carry_the_credential(server: JobServer) -> None:
    network = RecordingTransport()
    with JobHandle(server.submit(), server.requester.api(transport=network)) as handle:
        handle.cancel()
        assert handle.state() is JobState.CANCELLED
    assert network.requests[0] == f"POST /api/jobs/{handle.id}/cancel"
    assert network.credentials == {f"Bearer {server.requester.credential}"}


def test_waiting_reports_each_change_once(handle: JobHandle, provider: ScriptedProvider) -> None:
    provider.report("training")
    seen: list[JobView] = []

    def on_change(view: JobView) -> None:
        seen.append(view)
        if len(seen) == 1:
            provider.report("training", loss_record(0, 1.0))
        elif view.progress.updates == 1 and view.state is JobState.TRAINING:
            provider.finish()

    ended = handle.wait(on_change=on_change)
    assert ended.state is JobState.DONE
    assert seen[-1] == ended
    assert all(before != after for before, after in pairwise(seen))
    assert [view.progress.updates for view in seen[:2]] == [0, 1]


class Collected:
    """Receiver of records that keeps them."""

    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []

    def emit(self, record: WorkerRecord) -> None:
        self.records.append(record)


def test_figures_of_a_job_are_passed_on_once(handle: JobHandle, provider: ScriptedProvider) -> None:
    provider.report("training", loss_record(0, 2.0), validation_record(0, 0.5))
    sink = Collected()
    told: list[JobView] = []

    def on_change(view: JobView) -> None:
        told.append(view)
        if len(told) == 1:
            losses = loss_record(1, None), loss_record(2, 0.5)
            provider.report("training", *losses, WarningRecord("the disk is nearly full"))
        elif view.progress.updates == 3 and view.state is JobState.TRAINING:
            provider.finish()

    assert handle.follow(sink, timeout=60, on_change=on_change).state is JobState.DONE
    losses = [record for record in sink.records if isinstance(record, LossRecord)]
    assert [(record.update, record.loss) for record in losses] == [(0, 2.0), (1, None), (2, 0.5)]
    assert [r.value for r in sink.records if isinstance(r, ValidationRecord)] == [0.5]
    (warning,) = [r for r in sink.records if isinstance(r, WarningRecord)]
    assert "the disk is nearly full" in warning.message


def test_waiting_ends_at_the_deadline(handle: JobHandle) -> None:
    with pytest.raises(TimeoutError, match=rf"{handle.id} is still submitted after 0.1 s: .*provider"):
        handle.wait(timeout=0.1)


def test_waiting_outlasts_a_restart_of_the_server(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(handles, "RESTART", RetryPolicy(tries=20, sleep=pauses.append))
    network = RecordingTransport()
    network.failures = 10
    with JobHandle(server.submit(), server.requester.api(transport=network)) as handle:
        ended = handle.wait(on_change=lambda view: view.state.is_final or handle.cancel())
    assert ended.state is JobState.CANCELLED
    assert len(pauses) == 10


def test_the_result_is_loaded_into_the_model_and_written(
    handle: JobHandle, provider: ScriptedProvider, tmp_path: Path
) -> None:
    provider.report("training")
    provider.finish()
    model = small_job().model
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    shown: list[tuple[int, int]] = []
    state = handle.result(into=model, folder=tmp_path / "out", progress=lambda *p: shown.append(p))
    assert list(state) == list(expected)
    for found in (state, model.state_dict()):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["trained_state_dict.pt"]
    assert shown[-1][0] == shown[-1][1] > 0


def test_without_a_folder_no_file_is_left(
    handle: JobHandle, provider: ScriptedProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    provider.report("training")
    with in_background(provider.finish):
        assert list(handle.result()) == list(small_job().model.state_dict())
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("ravnest")]
    assert left == []


def test_a_failed_job_raises_its_reason(handle: JobHandle, provider: ScriptedProvider) -> None:
    provider.report("training")
    provider.report("failed", reason="out of memory")
    with pytest.raises(JobEndedError, match=rf"job {handle.id} failed: .*out of memory"):
        handle.result()
    with pytest.raises(ServerRefusedError, match="failed"):
        handle.cancel()


def test_a_cancelled_job_raises_its_reason(handle: JobHandle) -> None:
    handle.cancel()
    with pytest.raises(JobEndedError, match=f"job {handle.id} was cancelled: "):
        handle.fetch("nowhere")
