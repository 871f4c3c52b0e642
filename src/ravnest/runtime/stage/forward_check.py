"""Computes an output of a stage again from stated inputs and weights, and compares the two. Pure.

A stage is covered if its output follows from inputs, weights and seed up to rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any

import torch
from msgspec.structs import replace

from ravnest.errors import RavnestError
from ravnest.runtime.machine_failures import is_out_of_memory
from ravnest.runtime.stage.forward_passes import ForwardPasses
from ravnest.runtime.stage.randomness import draws
from ravnest.split.graph import Operation, StageGraph, StageSpec, refs_in
from ravnest.split.module import StageModule
from ravnest.split.written_state import written_values
from ravnest.store.checkpoint import DTYPES
from ravnest.store.forward_evidence import ForwardEvidence, own_arithmetic
from ravnest.types import MicrobatchId
from ravnest.wire.codecs import codec_named
from ravnest.wire.layout import TensorLayout

TOLERANCE = 0.01
"""Largest norm of a difference, in terms of the norm of the tensor, that counts as rounding."""
COARSE_TOLERANCE = 0.05
"""The same for tensors of 16 bits."""
_SELECTING = (
    "argmax",
    "argmin",
    "argsort",
    "bucketize",
    "kthvalue",
    "median",
    "mode",
    "multinomial",
    "searchsorted",
    "sort",
    "topk",
    "unique",
)
"""Operators that choose by comparison: a rounding error may change the choice and so the output."""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of a recomputation."""

    deviation: float = 0.0
    """Largest difference of a tensor, in terms of what is tolerated; above 1 it is no rounding error."""
    detail: str = ""
    """The tensor that differs most, or why nothing could be compared, as a clause."""
    compared: bool = True
    """False: this says nothing about the providers."""

    @property
    def differs(self) -> bool:
        """True if the output was not computed from what was stated."""
        return self.compared and not self.deviation <= 1.0


def uncovered(spec: StageSpec) -> str:
    """Return why outputs of a stage cannot be computed again elsewhere; empty if they can."""
    if not spec.has_gradients:
        return "it trains nothing, and does not keep its inputs"
    graph = spec.graphs["train"]
    types = [(each.key, each.dtype) for each in spec.state]
    types += [(each.name, each.dtype) for each in graph.inputs if each.dtype is not None]
    for name, dtype in types:
        if dtype not in DTYPES:
            return f"{name} has the type {dtype}, which is not stored"
    keys = {use.name: use.key for use in graph.state}
    inputs = [value.name for value in graph.inputs]
    written = {*written_values([*inputs, *keys], graph.operations)}
    for name in sorted(written & _read_for_output(graph)):
        return f"its output depends on {keys.get(name, name)}, which forward changes"
    for operation in graph.operations:
        words = operation.target.split("::")[-1].split(".")[0].split("_")
        if found := set(_SELECTING).intersection(words):
            return f"it chooses values by {min(found)}"
    return ""


def _read_for_output(graph: StageGraph) -> set[str]:
    """Return the values from which the outputs are computed.

    What normalisation reads does not count: in training, running statistics do not affect its output.
    """
    given = {use.name for use in graph.state}
    needed = {*refs_in(tuple(output.value for output in graph.outputs))}
    for operation in reversed(graph.operations):
        names = {*operation.refs()}
        name = operation.target.split("::")[-1].split(".")[0]
        changes_values = name.endswith("_") and not names <= given
        if operation.name in needed or changes_values:
            needed |= names - given if "_norm" in name else names
    return needed


def _draws(graph: StageGraph) -> bool:
    """Return whether a graph uses random numbers; attention without dropout does not."""
    return draws(replace(graph, operations=tuple(filterfalse(_is_plain_attention, graph.operations))))


def _is_plain_attention(operation: Operation) -> bool:
    dropout = dict(operation.kwargs).get("dropout_p", 0.0)
    if len(operation.args) > _DROPOUT:
        dropout = operation.args[_DROPOUT]
    return operation.target.startswith(_ATTENTION) and dropout == 0.0


def check_forward(
    spec: StageSpec,
    stated: ForwardEvidence,
    received: ForwardEvidence,
    *,
    seed: int,
    microbatch: MicrobatchId,
    codec: str = "raw",
) -> CheckResult:
    """Compute the output of a stage and compare it with what the next stage has received.

    ``codec`` is that of the link between the two. Statements that do not fit the stage are a difference.
    """
    if reason := uncovered(spec):
        return CheckResult(detail=reason, compared=False)
    if _draws(spec.graphs["train"]) and stated.arithmetic != own_arithmetic():
        detail = f"random numbers of {stated.arithmetic or 'an unknown library'} are other ones"
        return CheckResult(detail=detail, compared=False)
    try:
        module = StageModule(spec, _laid_out(spec, stated.state))
        inputs = [stated.values.get(value.name) for value in spec.graphs["train"].inputs]
        passes = ForwardPasses(module, seed, torch.device("cpu"))
        module.train()
        with torch.no_grad(), passes.randomness(microbatch, "train"):
            outputs = module(*inputs)
    except (RavnestError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return CheckResult(math.inf, f"what it stated is not a computation of the stage: {error}")
    names = [value.name for value in spec.graphs["train"].outputs]
    return compare(dict(zip(names, outputs, strict=True)), received.values, codec)


def _laid_out(spec: StageSpec, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with the strides that they have at the provider."""
    found = dict(state)
    for entry in spec.state:
        if entry.strides and entry.key in found and found[entry.key].shape == entry.shape:
            empty = torch.empty_strided(entry.shape, entry.strides, dtype=found[entry.key].dtype)
            found[entry.key] = empty.copy_(found[entry.key])
    return found


def compare(computed: Mapping[str, Any], received: Mapping[str, Any], codec: str) -> CheckResult:
    """Compare outputs by name; the one that differs most decides."""
    worst = CheckResult()
    for name, value in computed.items():
        if isinstance(value, torch.Tensor):
            other = received.get(name)
            found = _compared(name, sent_through(value, codec, other), other)
        else:
            same = value == received.get(name)
            found = CheckResult() if same else CheckResult(math.inf, f"the number {name}")
        if not found.compared:
            return found
        if not found.deviation <= worst.deviation:
            worst = found
    return worst


def _compared(name: str, value: torch.Tensor, other: Any) -> CheckResult:
    if not isinstance(other, torch.Tensor) or (other.shape, other.dtype) != (value.shape, value.dtype):
        return CheckResult(math.inf, f"{name} has another shape or type")
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return CheckResult() if torch.equal(value, other) else CheckResult(math.inf, f"{name} differs")
    if not bool(torch.isfinite(value).all()):
        return CheckResult(detail=f"{name} is not finite", compared=False)
    kind = torch.complex128 if value.dtype.is_complex else torch.float64
    norm = float(torch.linalg.vector_norm(value.to(kind)))
    difference = float(torch.linalg.vector_norm(other.to(kind) - value.to(kind)))
    tolerance = TOLERANCE if value.dtype.itemsize >= _SINGLE else COARSE_TOLERANCE
    # Outputs that are zero but for rounding errors have no size to compare with.
    relative = difference / max(norm, _LEAST_MEAN * math.sqrt(max(value.numel(), 1)))
    return CheckResult(relative / tolerance, f"{name} differs by {relative:.2g} of its norm")


def sent_through(value: torch.Tensor, codec: str, like: Any = None) -> torch.Tensor:
    """Return a tensor as it arrives over a link with a codec, in the memory layout of ``like``."""
    plain = value.detach().contiguous()
    if isinstance(like, torch.Tensor) and like.shape == plain.shape:
        plain = torch.empty_strided(like.shape, like.stride(), dtype=plain.dtype).copy_(plain)
    layout = TensorLayout(plain.dtype, tuple(plain.shape), plain.stride())
    encoded = codec_named(codec).encode(plain, layout)
    return codec_named(encoded.codec).decode(encoded.payload, layout)


_ATTENTION = "aten::scaled_dot_product_attention"
_DROPOUT = 4
"""Position of its argument ``dropout_p``."""
_SINGLE = 4
"""Bytes of a number in single precision."""
_LEAST_MEAN = 1e-5
"""Root mean square below which a tensor counts as zero."""
