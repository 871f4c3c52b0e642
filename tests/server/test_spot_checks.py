"""Spot checks: how often, who is blamed, and what happens to a provider whose output is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import provider, training_pair
from server_cases import Caller, Case, FakePlanner, opened
from takeover_cases import recoveries, state_of, view
from torch import nn

from ravnest.deadlines import SPOT_CHECK_ANSWER
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.forward_check import CheckResult
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.server.scheduling.check_process import SandboxedChecker
from ravnest.server.scheduling.check_program import CheckRequest
from ravnest.server.scheduling.spot_checks import (
    MOST_UNANSWERED,
    SHARE,
    CheckedPlace,
    CheckHistory,
    least_interval,
)
from ravnest.server.settings import ServerSettings
from ravnest.split import split
from ravnest.split.module import StageModule
from ravnest.store.bundle import STAGE_FILE, save_stage
from ravnest.store.forward_evidence import ForwardEvidence, own_arithmetic, write_evidence
from ravnest.types import MicrobatchId

INTERVAL = 1800.0
WRONG = CheckResult(20.0, "linear differs by 0.2 of its norm")
PLACE = CheckedPlace("job", 0, 0, 0)


# Decisions


@pytest.mark.parametrize(("size", "bandwidth"), [(1_000_000, 1000.0), (2_000_000_000, 100.0), (8, 1.0)])
def test_checks_take_one_percent_of_time_and_bandwidth(size: int, bandwidth: float) -> None:
    interval = least_interval(size, bandwidth)
    assert size * 8 / (bandwidth * 1e6) <= SHARE * interval
    assert size / 200e6 <= SHARE * interval


def test_the_sender_is_blamed_and_its_accuser_the_second_time() -> None:
    history = CheckHistory()
    assert history.differs(PLACE, "alice", "bob") == "sender"
    assert history.differs(PLACE, "alice", "bob") == "sender", "the same provider, wrong again"
    assert history.differs(PLACE, "carol", "bob") == "receiver", "two stand against one"
    other = CheckedPlace("job", 1, 1, 2)
    assert history.differs(other, "dave", "bob") == "receiver", "a new plan does not clear its record"
    assert history.differs(CheckedPlace("other", 0, 0, 0), "dave", "bob") == "sender"
    assert history.differs(PLACE, "carol", "erin") == "sender"
    history.keep({"another job"})
    assert history.differs(PLACE, "carol", "bob") == "sender"


def test_checks_without_an_answer_count_in_a_row() -> None:
    history = CheckHistory()
    for _ in range(3):
        for _ in range(MOST_UNANSWERED - 1):
            assert history.unanswered(PLACE, "alice", "bob") is None
        history.agreed(PLACE, "alice")
    for _ in range(MOST_UNANSWERED - 1):
        assert history.unanswered(PLACE, "alice", "bob") is None
    assert history.unanswered(PLACE, "alice", "bob") == "sender"


# The service, with a checker that says what the test tells it to


class Told:
    """Checker with the result that a test gives it."""

    is_available = True

    def __init__(self) -> None:
        self.result = CheckResult(0.001, "linear differs by 1e-05 of its norm")
        self.requests: list[CheckRequest] = []

    def check(self, request: CheckRequest) -> CheckResult:
        assert all(Path(each).exists() for each in (request.stage, request.stated, request.received))
        self.requests.append(request)
        return self.result


class Checked:
    """A server whose checks are carried out at once, with a Root, a Leaf and a job."""

    def __init__(self, case: Case, checker: Told) -> None:
        case.server.spot_check_service._run = lambda work: work()
        self.case, self.checker = case, checker
        self.rita, self.job, self.alice, self.bob = training_pair(case)
        self._number = 0

    def evidence(self, caller: Caller, check: str, part: str, index: int = 3) -> dict[str, Any]:
        self._number += 1
        content = f"{part} {check} {self._number}".encode()
        file = {"sha256": caller.upload(content), "size": len(content)}
        return {"check": check, "part": part, "phase": 0, "index": index, "file": file}

    def check(self, sender: Caller, receiver: Caller, *, answered: bool = True) -> None:
        """Have both sides report their files of another check."""
        name = f"c{self._number}"
        receiver.report("training", checks=[self.evidence(receiver, name, "received")])
        if answered:
            sender.report("training", checks=[self.evidence(sender, name, "stated")])

    def warnings(self) -> list[str]:
        return [each["reason"] for each in self.case.events() if each["kind"] == "warning"]


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Checked]:
    checker = Told()
    planner = FakePlanner(needs=2, spot_checks=INTERVAL)
    settings = ServerSettings(unused_files_kept=0.0)
    with opened(tmp_path, planner=planner, checker=checker, settings=settings) as case:
        yield Checked(case, checker)


def test_an_output_that_agrees_changes_nothing(checked: Checked) -> None:
    checked.check(checked.alice, checked.bob)
    (request,) = checked.checker.requests
    assert (request.phase, request.index, request.codec) == (0, 3, "raw")
    assert not checked.warnings()
    assert view(checked.rita, checked.job)["state"] == "training"
    checked.case.server.run_due()
    assert not any(Path(each).exists() for each in (request.stated, request.received))
    assert Path(request.stage).exists()


def test_a_provider_with_a_wrong_output_is_ended_recorded_and_replaced(checked: Checked) -> None:
    carol = provider(checked.case, "carol", 2)
    checked.checker.result = WRONG
    checked.check(checked.alice, checked.bob)
    (warning,) = checked.warnings()
    assert warning == (
        "spot check of alice (node_0 (Root of cluster 0)), received by bob: micro-batch 3 of phase 0: "
        "the output is not what the server computes from the input and the weights that it states: "
        "linear differs by 0.2 of its norm"
    )
    assert carol.heartbeat()["assignment"] == f"{checked.job}-0-g1"
    assert checked.alice.heartbeat()["assignment"] is None
    assert state_of(checked.case, checked.alice) == "offered"
    lost, taken = recoveries(checked.rita, checked.job)
    assert "has lost its provider alice: a spot check has failed" in lost
    assert "carol takes the place of node_0" in taken
    checked.checker.result = CheckResult()
    carol.report("fetched")
    carol.report("training")
    checked.check(carol, checked.bob)
    assert view(checked.rita, checked.job)["state"] == "training"


def test_a_provider_that_was_ended_gets_no_place_in_the_job_again(checked: Checked) -> None:
    """It is idle, and the only one: the place stays vacant until another one comes."""
    checked.checker.result = WRONG
    checked.check(checked.alice, checked.bob)
    assert "waits for a provider" in view(checked.rita, checked.job)["reason"]
    checked.alice.heartbeat()
    checked.case.match()
    assert checked.alice.heartbeat()["assignment"] is None
    carol = provider(checked.case, "carol", 2)
    assert carol.heartbeat()["assignment"] == f"{checked.job}-0-g1"
    with checked.case.server.db.read() as db:
        assert db.assignments.barred(checked.job) == {checked.alice.id}
        assert db.assignments.unreliable([checked.alice.id, checked.bob.id]) == {checked.alice.id}


def test_a_new_plan_is_made_without_the_provider_that_was_ended(checked: Checked) -> None:
    checked.checker.result = WRONG
    checked.check(checked.alice, checked.bob)
    record = checked.case.server.db
    with record.read() as db:
        job = db.jobs.get(checked.job)
        present = db.providers.present()
    assert job is not None
    checked.case.server.matching.plan_with(job, present)
    assert checked.case.planner.asked[-1] == (checked.bob.id,)


def test_a_receiver_that_accuses_the_next_provider_too_is_ended_itself(checked: Checked) -> None:
    carol = provider(checked.case, "carol", 2)
    checked.checker.result = WRONG
    checked.check(checked.alice, checked.bob)
    carol.report("fetched")
    carol.report("training")
    checked.check(carol, checked.bob)
    assert "the provider before looked wrong to bob too, which is blamed" in checked.warnings()[-1]
    assert carol.heartbeat()["assignment"] == f"{checked.job}-0-g1"
    assert checked.bob.heartbeat()["assignment"] is None


def test_a_provider_that_never_answers_is_ended(checked: Checked) -> None:
    for count in range(MOST_UNANSWERED):
        assert checked.alice.heartbeat()["assignment"] == f"{checked.job}-0", count
        checked.check(checked.alice, checked.bob, answered=False)
        for _ in range(int(SPOT_CHECK_ANSWER / 60)):
            checked.case.time.now += 60
            checked.alice.heartbeat()
            checked.bob.heartbeat()
        checked.case.server.run_due()
    assert checked.alice.heartbeat()["assignment"] is None
    assert len([each for each in checked.warnings() if "it has not stated" in each]) == MOST_UNANSWERED


@pytest.mark.parametrize("kind", ["another check", "another micro-batch", "not compared"])
def test_nobody_is_blamed_for_what_cannot_be_compared(checked: Checked, kind: str) -> None:
    checked.checker.result = WRONG
    alice, bob = checked.alice, checked.bob
    bob.report("training", checks=[checked.evidence(bob, "one", "received")])
    if kind == "not compared":
        checked.checker.result = CheckResult(detail="y is not finite", compared=False)
        alice.report("training", checks=[checked.evidence(alice, "one", "stated")])
    else:
        check, index = ("two", 3) if kind == "another check" else ("one", 4)
        alice.report("training", checks=[checked.evidence(alice, check, "stated", index)])
        assert not checked.checker.requests
    assert not checked.warnings()
    assert alice.heartbeat()["assignment"] == f"{checked.job}-0"


def test_files_that_were_not_uploaded_do_not_count(checked: Checked) -> None:
    absent = {"sha256": "0" * 64, "size": 3}
    given = {"check": "one", "part": "received", "phase": 0, "index": 3, "file": absent}
    checked.bob.report("training", checks=[given])
    checked.alice.report("training", checks=[checked.evidence(checked.alice, "one", "stated")])
    assert not checked.checker.requests
    checked.bob.report("training", 422, checks=[{**given, "check": "../x"}])


def test_a_job_without_checks_takes_none(tmp_path: Path) -> None:
    checker = Told()
    with opened(tmp_path, planner=FakePlanner(needs=2), checker=checker) as case:
        found = Checked(case, checker)
        found.check(found.alice, found.bob)
        assert not checker.requests


def test_the_interval_is_the_setting_or_what_the_cost_allows(checked: Checked) -> None:
    service = checked.case.server.spot_check_service
    assert service.interval(10.0) == checked.case.server.settings.spot_checks
    assert service.interval(1e6) == 1e6
    assert service.interval(0.0) == 0.0, "a stage that is not covered"
    checked.checker.is_available = False
    assert service.interval(10.0) == 0.0


# The process that computes


def test_an_output_is_computed_again_in_a_sandbox(tmp_path: Path) -> None:
    checker = SandboxedChecker(120.0)
    if not checker.is_available:
        pytest.skip("this system has no sandbox")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3))
    stage = split(model, torch.randn(4, 8), stages=2, check=False).stages[0]
    save_stage(tmp_path, stage)
    module = StageModule(stage.spec, {key: t.clone() for key, t in stage.tensors.items()})
    rule = UpdateRule(torch.optim.SGD, {"lr": 0.1})
    execution = StageExecution(module, rule, seed=3, stash=False)
    (name,) = [value.name for value in module.graph.inputs]
    microbatch = MicrobatchId(2, 1)
    outputs, _ = execution.forward(microbatch, 0, {name: torch.randn(4, 8)})
    found = execution.computed_from(microbatch)
    assert found is not None
    write_evidence(tmp_path / "stated", ForwardEvidence(*found, own_arithmetic()))
    write_evidence(tmp_path / "honest", ForwardEvidence(outputs, {}))
    (tmp_path / "damaged").write_bytes(b"\xff" * 100)

    def check(stated: str, received: str) -> CheckResult:
        files = (str(tmp_path / each) for each in (STAGE_FILE, stated, received))
        return checker.check(CheckRequest(*files, seed=3, phase=2, index=1, codec="raw", memory=1 << 30))

    assert check("stated", "honest").deviation < 0.01
    assert check("damaged", "honest").deviation == math.inf
