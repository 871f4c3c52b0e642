"""Workers train with torch's optimizers and do not import its compiler."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from torch.optim import Optimizer

from ravnest.jobs.registry import optimizer_classes

_MODULES = ("torch._dynamo", "sympy", "ravnest.split.capture")


def trained(kind: type[Optimizer]) -> str:
    """Return a digest of weights and optimizer state after some updates, with a restored state."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(4, 5, generator=generator).requires_grad_()
    digest = hashlib.sha256()
    for _ in range(2):
        made = kind([weight])
        made.load_state_dict(made.state_dict())
        for _ in range(3):
            made.zero_grad()
            weight.grad = torch.rand(4, 5, generator=generator)
            if kind is torch.optim.SparseAdam:
                weight.grad = weight.grad.to_sparse()
            made.step()
            assert not weight.requires_grad_().grad_fn
            digest.update(weight.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_a_worker_does_not_import_the_compiler_and_trains_the_same() -> None:
    script = """
import sys
from ravnest.provider import worker
from ravnest.provider.training import warm_up
from ravnest.jobs.registry import optimizer_classes
warm_up(1)
import torch
from ravnest.runtime.data import Criterion
from ravnest.split.loss_weighting import find_weighting
labels = torch.tensor([0, 1, 2, 1])
find_weighting(Criterion(torch.nn.CrossEntropyLoss()), torch.rand(4, 3), labels, 4)
import test_uncompiled
for kind in optimizer_classes():
    print(kind.__name__, test_uncompiled.trained(kind))
print(*(name for name in test_uncompiled._MODULES if name in sys.modules))
"""
    folders = [path for path in sys.path if path]
    prelude = f"import sys; sys.path[:] = {folders!r}\n"
    found = subprocess.run(
        [sys.executable, "-c", prelude + script], capture_output=True, text=True, timeout=120, check=True
    )
    *digests, imported = found.stdout.removesuffix("\n").split("\n")
    assert imported == ""
    assert digests == [f"{kind.__name__} {trained(kind)}" for kind in optimizer_classes()]
