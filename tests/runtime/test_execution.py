"""A stage accumulates the gradients that autograd accumulates, to the last bit."""

import pytest
import torch
from torch import nn

from ravnest.errors import SettingsError
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import split
from ravnest.split.module import StageModule
from ravnest.types import MicrobatchId

MICROBATCHES = 3


@pytest.mark.parametrize("rows", [16, 64, 300])
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("frugal", [True, False])
def test_gradients_of_large_layers_are_those_of_autograd(rows: int, defer: bool, frugal: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.LayerNorm(512))
    batches = torch.randn(MICROBATCHES, rows, 512)
    (stage,) = split(model, batches[0], stages=1).stages
    module = StageModule(stage.spec, {key: t.clone() for key, t in stage.tensors.items()})
    rule = UpdateRule(torch.optim.SGD, {"lr": 0.1})
    execution = StageExecution(module, rule, seed=0, stash=False, defer=defer, frugal=frugal)
    (name,) = [spec.name for spec in module.graph.inputs]
    loss_part = LossPart(lambda outputs: outputs[0].square().mean())
    for index, x in enumerate(batches):
        model(x).square().mean().backward()
        microbatch = MicrobatchId(0, index)
        execution.forward(microbatch, 0, {name: x}, loss_part)
        execution.backward(microbatch, {})
        if defer:
            execution.weight_gradients(microbatch)
    found = execution.updates.gradients
    assert found.keys() == {key for key, _ in model.named_parameters()}
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found[key], parameter.grad)


def test_async_rejects_a_forward_that_writes_to_a_trained_weight() -> None:
    """An update can overtake the write, so that it would be lost."""
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=1), nn.Linear(4, 4))
    (stage,) = split(model, torch.arange(6), stages=1, check=False).stages
    module = StageModule(stage.spec, {key: t.clone() for key, t in stage.tensors.items()})
    rule = UpdateRule(torch.optim.SGD, {"lr": 0.1})
    StageExecution(module, rule, seed=0, stash=False)
    with pytest.raises(SettingsError, match=r"writes to the weight 0\.weight.* Use schedule=\"sync\""):
        StageExecution(module, rule, seed=0, stash=True)
