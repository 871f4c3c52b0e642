"""Refuse models whose results depend on more than inputs, parameters, buffers and torch's generator.

Stages have nothing else. The unsplit model runs twice with the same seed and state. If a run changes
plain attributes of modules, the model runs again with attributes that another batch has left: results
of a forward that only stores what it computed do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ravnest.errors import ExactnessError
from ravnest.split.capture import Capture
from ravnest.split.check_runs import run_forward
from ravnest.split.example import Example
from ravnest.split.graph import MODES, Mode
from ravnest.split.kept_model import model_kept
from ravnest.split.plain_attributes import changed_attributes, describe_attributes
from ravnest.split.rows import vary_floats

ROUNDING = 1e-4
"""Largest relative difference of two runs that kernels with a varying order of sums explain."""
_SEED = 20_240_311
_SHOWN = 3


def check_repeatable(capture: Capture, example: Example) -> None:
    """Raise ``ExactnessError`` if the model does not repeat its results, or changes with every call."""
    for mode in MODES:
        _check_mode(capture, example, mode)


def _check_mode(capture: Capture, example: Example, mode: Mode) -> None:
    model = capture.model
    with model_kept(model):
        before = describe_attributes(model)
        expected = run_forward(capture, example, mode)
        after = describe_attributes(model)
        changed = changed_attributes(before, after)
        again = run_forward(capture, example, mode)
        if further := changed_attributes(after, describe_attributes(model)):
            raise ExactnessError(
                f"forward changes {_named(further)} with every call. A stage has parameters and buffers "
                "only, so that it would repeat the first call for ever. Keep a number that forward "
                "changes in a buffer (self.register_buffer(name, tensor)) and compute with it as a "
                "tensor, or move it out of forward"
            )
        if (difference := _largest_difference(expected, again)) > ROUNDING:
            _refuse(mode, difference, changed)
    if changed:
        _check_effect(capture, example, mode, expected, changed)


def _check_effect(
    capture: Capture,
    example: Example,
    mode: Mode,
    expected: Mapping[str, torch.Tensor],
    changed: Sequence[str],
) -> None:
    """Compare with a run that finds the attributes as another batch has left them."""
    generator = torch.Generator().manual_seed(_SEED)
    varied = [vary_floats(tensor.cpu(), generator).to(tensor.device) for tensor in example.tensors]
    with model_kept(capture.model):
        run_forward(capture, replace(example, tensors=tuple(varied)), mode)
        found = run_forward(capture, example, mode)
        if (difference := _largest_difference(expected, found)) > ROUNDING:
            _refuse(mode, difference, changed)


def _refuse(mode: Mode, difference: float, changed: Sequence[str]) -> None:
    if changed:
        raise ExactnessError(
            f"forward stores {_named(changed)} and uses it in the next call: in {mode} mode two calls "
            f"with the same input differ by {difference:.1e}. A stage has parameters and buffers only. "
            "Register the stored value as a buffer and compute with it as a tensor; run an "
            "initialisation that happens at the first call before splitting"
        )
    raise ExactnessError(
        f"the model does not repeat its own results: in {mode} mode two calls with the same input, "
        f"weights and seed of torch differ by {difference:.1e} relative to the largest value. Random "
        "numbers from a generator other than torch's default one (random.Random, numpy's default_rng, "
        "torch.Generator), the time, or a variable outside the model that forward changes are possible "
        "reasons. Draw with torch.rand or dropout, and keep state in buffers"
    )


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(f"the attribute {name}" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _largest_difference(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> float:
    """Return the largest difference of two runs, relative to the largest value of each output."""
    if list(expected) != list(found):
        return float("inf")
    return max((_difference(a, found[name]) for name, a in expected.items()), default=0.0)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    one, other = a.to(wide), b.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    off = torch.where(same, torch.zeros_like(one), one - other).abs()
    scale = one.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()
    worst = float(torch.nan_to_num(off, nan=float("inf")).max())
    return worst / max(float(scale), torch.finfo(torch.float32).tiny)
