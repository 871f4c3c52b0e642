"""What a stage keeps of micro-batches that have left it."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.microbatches import Microbatch, MicrobatchStore
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import Chain, split
from ravnest.types import MicrobatchId
from ravnest.wire.messages import Backward, PhaseBegin


def test_gradients_that_were_sent_are_not_kept() -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    _, module, _ = Chain.of(split(nn.Sequential(*layers), torch.randn(4, 8), stages=3)).modules
    execution = StageExecution(module, UpdateRule(torch.optim.SGD), seed=0, stash=False)
    store = MicrobatchStore(execution, None)
    store.begin_phase(PhaseBegin("run", 0, "train", 0))
    number = MicrobatchId(0, 0)
    (entering,) = [spec.name for spec in module.graph.inputs]
    store.add(Microbatch(number, 4, {entering: torch.randn(4, 8)}))
    outputs = dict(store.forward(number, 0, trains=True).outputs)
    store.add_gradients(Backward("run", number), {k: torch.ones_like(v) for k, v in outputs.items()})
    store.backward(number)
    message = store.backward_message(number, ())
    assert list(message.values) == [entering]
    sent = weakref.ref(message.values[entering])
    del message
    assert store.last is not None
    assert sent() is None
