"""A provider whose worker sends wrong outputs is found, ended and replaced, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback_server import SECONDS, UPDATES_PER_EPOCH, loopback_server, wait_for_updates
from running_providers import providers

from ravnest.client.handle import JobHandle
from ravnest.provider import worker_process
from ravnest.runtime.stage.forward_check import CheckResult
from ravnest.server.scheduling.check_program import CheckRequest, checked

EPOCHS = 150
LIE = (
    "from ravnest.runtime.stage.execution import StageExecution\n"
    "send = StageExecution._send\n"
    "def lie(self, outputs):\n"
    "    sent = send(self, outputs)\n"
    "    return {name: 0.9 * value for name, value in sent.items()}\n"
    "if '/liar-' in sys.argv[2]:\n"
    "    StageExecution._send = lie\n"
)
WORK = "code = work("


class Here:
    """Checker that computes in this process, so that a test does not wait for imports."""

    is_available = True

    def __init__(self) -> None:
        self.results: list[CheckResult] = []

    def check(self, request: CheckRequest) -> CheckResult:
        self.results.append(checked(request))
        return self.results[-1]


def events(handle: JobHandle, kind: str) -> list[str]:
    return [event.reason for event in handle.events() if event.kind == kind]


@pytest.mark.slow
def test_a_lying_worker_is_found_and_the_job_is_completed_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = worker_process._BOOT
    monkeypatch.setattr(worker_process, "_BOOT", boot.replace(WORK, LIE + WORK))
    with loopback_server(tmp_path / "server", spot_checks=0.2) as server:
        checker = server.running.server.spot_check_service._checker = Here()  # type: ignore[assignment]
        with (
            providers(server, tmp_path, "liar-a", "liar-b"),  # only the output of the Root is sent on
            server.submit(min_providers=2, epochs=EPOCHS) as handle,
        ):
            wait_for_updates(handle)
            with providers(server, tmp_path, "spare") as (spare,):
                spare.wait_for("starts training")
                found = [each for each in events(handle, "warning") if "spot check of liar-" in each]
                (warning,) = found
                assert "differs by 0.1 of its norm" in warning
                lost, taken = events(handle, "recovery")[:2]
                assert "a spot check has failed" in lost
                assert "spare takes the place of node_0 (Root of cluster 0)" in taken
                assert len(handle.result(timeout=2 * SECONDS)) == 6
                assert list(handle.losses().updates) == list(range(EPOCHS * UPDATES_PER_EPOCH))
    assert all(each.compared for each in checker.results)
    assert all(each.deviation < 0.1 for each in checker.results if not each.differs)
