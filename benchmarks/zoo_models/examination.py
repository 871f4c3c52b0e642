"""Split one model of the zoo and report the result: exact stages, a difference, or an error."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ravnest.errors import SplitError
from ravnest.split import Chain, Split, prepare, split, verify
from ravnest.split.splitter import balanced_cuts
from ravnest.store.bundle import load_module, save_stage
from zoo_models.exactness import FIRST_STEP, Recording, Unsplit, compare, is_noise, record_training
from zoo_models.registry import ZooModel

ROOT = Path(__file__).resolve().parents[2]
BITWISE = "bitwise"


@dataclass
class Finding:
    """Result of one model."""

    name: str
    source: str
    parameters: int = 0
    operations: int = 0
    seconds: float = 0.0
    """CPU time of one split: capture, measure, cut and self-check."""
    cells: dict[str, str] = field(default_factory=dict)
    """Result by number of stages, as text: bitwise, the difference, or the error."""
    refusal: str | None = None
    """Message of the expected error."""
    notes: list[str] = field(default_factory=list)
    ok: bool = False
    """True if the result is the one that the registry expects."""


def examine(model: ZooModel, stages: Sequence[int]) -> Finding:
    """Split a model into each number of stages and compare, or check that it is rejected."""
    finding = Finding(model.name, model.source)
    if model.refusal is not None:
        _examine_refusal(model, model.refusal, finding)
    else:
        _examine_stages(model, stages, finding)
    return finding


def plain(message: str) -> str:
    """Return a message without the paths of this machine."""
    message = re.sub(r"[^\s\"'(]*/(site-packages|lib/python[\d.]+)/", "", message)
    return message.replace(f"{ROOT}/", "")


def _examine_refusal(model: ZooModel, expected: str, finding: Finding) -> None:
    module, args, kwargs = model.build()
    try:
        split(module, args, kwargs, stages=2)
    except SplitError as error:
        finding.refusal = plain(str(error))
        finding.ok = expected in finding.refusal
        if not finding.ok:
            finding.notes.append(f"rejected, but without the words {expected!r}")
    except Exception as error:
        finding.notes.append(f"not a SplitError: {_first_line(error)}")
    else:
        finding.notes.append("was split, but should be rejected")


def _examine_stages(model: ZooModel, stages: Sequence[int], finding: Finding) -> None:
    module, args, kwargs = model.build()
    finding.parameters = sum(parameter.numel() for parameter in module.parameters())
    reference = model.build()[0]
    before = _state(reference)
    if model.reference is not None:
        model.reference.alter(reference)
        finding.notes.append(model.reference.note)
    started = time.process_time()
    try:
        prepared = prepare(module, args, kwargs)
        preparing = time.process_time() - started
        finding.operations = len(prepared.layouts["train"].operations)
        whole = not prepared.capture.fixed_batch
        if not whole:
            finding.notes.append("batch size fixed")
        expected = record_training(Unsplit(reference), args, kwargs, small_batch=whole)
    except Exception as error:
        finding.notes.append(_first_line(error))
        return

    exact = True
    for count in stages:
        started = time.process_time()
        try:
            result = prepared.cut(balanced_cuts(prepared, [1.0] * count))
            verify(prepared.capture, [result.stages])
            seconds = preparing + time.process_time() - started
            finding.seconds = round(max(finding.seconds, seconds), 1)
            chain = _through_files(result)
            actual = record_training(chain, args, kwargs, small_batch=whole)
            reference.load_state_dict(chain.state_dict(), strict=True)
            same = is_noise(expected, actual)
        except Exception as error:
            exact = False
            finding.cells[str(count)] = _first_line(error)
        else:
            exact = exact and same
            finding.cells[str(count)] = _result(expected, actual)
    changed = compare(before, _state(module))
    if changed:
        finding.notes.append(f"splitting changed the model's own {changed.name}")
    finding.ok = exact and not changed


def _result(expected: Recording, actual: Recording) -> str:
    first, worst = compare(expected, actual, FIRST_STEP), compare(expected, actual)
    if worst is None:
        return BITWISE
    if first is None or first.name == worst.name:
        return str(worst)
    return f"{first.relative:.0e}, at the end {worst}"


def _through_files(result: Split) -> Chain:
    """Return the stages as a provider loads them: written, read and checked."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(stage.spec.index)) for stage in result.stages]
        for place, stage in zip(places, result.stages, strict=True):
            save_stage(place, stage)
        return Chain(load_module(place) for place in places)


def _state(module: Any) -> Recording:
    return {f"state {name}": t.detach().clone() for name, t in module.state_dict().items()}


def _first_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return plain(f"{type(error).__name__}: {first}")[:300]
