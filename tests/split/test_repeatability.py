"""Models with state or randomness that stages do not have are refused; the model is never changed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ravnest.errors import CaptureError, ExactnessError, SplitError
from ravnest.split import split
from ravnest.split.plain_attributes import describe_attributes, keep_attributes


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)


class PythonRandom(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.outer(x * 2 if random.random() < 0.5 else x)


class LayerDrop(Base):
    """A layer that is dropped so rarely that two runs hardly ever differ."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if random.uniform(0, 1) > 1e-9:
            x = self.inner(x)
        return self.outer(x)


class Shuffle(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = [0, 1, 2, 3]
        random.shuffle(order)
        return self.outer(self.inner(x)[:, order])


class NumpyRandom(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) * float(np.random.rand()))


class OwnGenerator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) * self.generator.random())


_GLOBAL = np.random.default_rng(7)


class GlobalGenerator(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) * float(_GLOBAL.random()))


class PlainTensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.add_(1)
        return self.outer(self.inner(x) * self.scale)


class Counter(Base):
    """A counter whose effect comes after many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.inner(x)
        return self.outer(x * 2 if self.calls > 1000 else x)


class NestedCounter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = {"calls": [0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.statistics["calls"][0] += 1
        return self.outer(self.inner(x))


class FirstCall(Base):
    """Initialisation from the first batch, as activation normalisation does it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.initialised = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if not self.initialised:
            self.shift.data = -x.mean(0).detach()
            self.initialised = True
        return self.outer(x + self.shift)


class PreviousBatch(Base):
    """A plain tensor that is carried to the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        found = x if self.previous is None else x + self.previous
        self.previous = x.detach().mean(0)
        return self.outer(found)


class StoredAttention(Base):
    """Results that are stored for the user to look at, and never read by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: torch.Tensor | None = None
        self.width = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.width = x.shape[1]
        self.attention = self.inner(x).softmax(-1)
        return self.outer(self.attention)


class ClampedWeight(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.outer(self.inner(x))


class RenormalisedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, max_norm=0.5)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.embedding(x[:, 0].long().abs() % 10))


class RunningMean(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inner(x))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.outer(x - self.mean)


REFUSED: list[tuple[type[Base], type[SplitError], str]] = [
    (PythonRandom, CaptureError, "Python's random module"),
    (LayerDrop, CaptureError, "Python's random module"),
    (Shuffle, CaptureError, "Python's random module"),
    (NumpyRandom, CaptureError, r"numpy\.random"),
    (OwnGenerator, ExactnessError, "changes the attribute generator with every call"),
    (GlobalGenerator, ExactnessError, "does not repeat its own results"),
    (PlainTensor, ExactnessError, "changes the attribute scale with every call"),
    (Counter, ExactnessError, "changes the attribute calls with every call"),
    (NestedCounter, ExactnessError, "changes the attribute statistics with every call"),
    (FirstCall, ExactnessError, "stores the attribute initialised and uses it"),
    (PreviousBatch, ExactnessError, "stores the attribute previous and uses it"),
]
ACCEPTED = [StoredAttention, ClampedWeight, RenormalisedEmbedding, RunningMean]


@pytest.mark.parametrize(("kind", "error", "words"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_hidden_state_and_randomness_are_refused(
    kind: Callable[[], nn.Module], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        split(kind(), (_inputs(),))


@pytest.mark.parametrize("call", [0, 1, 4, 7])
@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_another_thread_may_draw_numbers(
    call: int, draw: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the user's program draws once, while forward is captured or compared with stages."""
    calls = itertools.count()

    def forward(self: Base, x: torch.Tensor) -> torch.Tensor:
        if next(calls) == call:
            other = threading.Thread(target=draw)
            other.start()
            other.join()
        found: torch.Tensor = self.outer(self.inner(x))
        return found

    monkeypatch.setattr(Base, "forward", forward)
    assert len(split(Base(), (_inputs(),)).stages) == 2
    assert next(calls) > call


@pytest.mark.parametrize("kind", ACCEPTED)
def test_other_state_is_split(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert len(split(kind(), (_inputs(),)).stages) == 2


@pytest.mark.parametrize("kind", [*ACCEPTED, *(case[0] for case in REFUSED)])
def test_split_never_changes_the_model(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    model.outer.eval()
    inputs = _inputs()
    before = _everything(model, inputs)
    with contextlib.suppress(SplitError):
        split(model, (inputs,))
    assert _everything(model, inputs) == before


def test_a_batch_norm_that_is_used_twice_keeps_its_statistics() -> None:
    """Steps follow each other in the check, so that statistics after them are compared too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    split(model, (_inputs(),))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_attributes_are_put_back() -> None:
    model = StoredAttention()
    model.table = {"a": [1, {2}], "tensor": torch.ones(2)}
    before = describe_attributes(model)
    put_back = keep_attributes(model)
    model.table["a"][1].add(3)
    model.table["a"].append(4)
    model.table["tensor"].zero_()
    model.table["new"] = 1
    model.width = 7
    model.added = "text"
    assert describe_attributes(model) != before
    put_back()
    assert describe_attributes(model) == before


def _inputs() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def _everything(model: nn.Module, inputs: torch.Tensor) -> dict[str, Any]:
    """Return all state that a split could change."""
    state = {key: value.tolist() for key, value in model.state_dict().items()}
    return {
        "state": state,
        "objects": {name: id(value) for name, value in model.named_parameters()},
        "memory": {name: value.data_ptr() for name, value in model.named_parameters()},
        "gradients": [parameter.grad for parameter in model.parameters()],
        "attributes": describe_attributes(model),
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": repr(np.random.get_state(legacy=False)),
        "inputs": inputs.tolist(),
    }
