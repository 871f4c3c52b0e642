"""A stage leaves deferred weight gradients for what arrives, and goes on with them later."""

from types import SimpleNamespace
from typing import Any, cast

from ravnest.runtime.control.run_status import RunStatus
from ravnest.runtime.schedule.events import (
    Action,
    Done,
    Event,
    RunBackward,
    RunWeights,
    WeightsInterrupted,
)
from ravnest.runtime.stage.inbox import WorkerInbox
from ravnest.runtime.stage.pipeline_stage import PipelineStage
from ravnest.types import MicrobatchId

FIRST = MicrobatchId(0, 0)


class Machine:
    """Machine that requests one computation after the other, whatever happens."""

    def __init__(self, *requests: Action) -> None:
        self.requests = list(requests)
        self.events: list[Event] = []

    def handle(self, event: Event, _now: float) -> list[Action]:
        self.events.append(event)
        return [self.requests.pop(0)] if self.requests else []


def test_what_arrives_interrupts_weight_gradients_and_nothing_else() -> None:
    layers = iter(range(3))
    inbox = WorkerInbox()

    def weight_gradients(_microbatch: MicrobatchId, interrupted: Any) -> bool:
        return all(not interrupted() for _layer in layers)

    execution = SimpleNamespace(
        weight_gradients=weight_gradients, updates=SimpleNamespace(stop_on_nan=False)
    )
    store = SimpleNamespace(execution=execution, backward=lambda _id: SimpleNamespace())
    machine = Machine(RunWeights(FIRST, 0), RunBackward(FIRST, 0), RunWeights(FIRST, 0))
    stage = PipelineStage(
        cast(Any, machine),
        cast(Any, store),
        RunStatus(),
        inbox,
        observer=cast(Any, None),
        averaging=None,
        checkpoints=None,
        report_validation=lambda _result: None,
    )
    inbox.post(lambda: None)
    stage.handle(Done())
    for arrived in (True, True, False):
        if not arrived:
            inbox.calls.get()
        stage.compute()
        stage.finish_computation()
    assert machine.events == [Done(), WeightsInterrupted(), Done(), Done()]
    assert list(layers) == [], "the second call went on where the first one stopped"
