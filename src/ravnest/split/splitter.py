"""Split a captured model into stages at given cuts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ravnest.errors import SplitError
from ravnest.split.aliases import find_aliases
from ravnest.split.assembly import assemble, check_operators
from ravnest.split.capture import Capture, ModeCapture, capture
from ravnest.split.cuts import CutLayout, lay_out
from ravnest.split.dimensions import Dimensions
from ravnest.split.eval_cuts import follow_training, state_keys
from ravnest.split.graph import (
    MODES,
    InputEntry,
    Mode,
    StageGraph,
    StageSpec,
    StateSpec,
    SymbolRange,
)
from ravnest.split.measure import Measurement, measure
from ravnest.split.normalise import normalise
from ravnest.split.precision import Precision
from ravnest.split.recurrent_shapes import lengths_vary
from ravnest.split.row_blocks import cut_into_blocks
from ravnest.split.self_check import verify
from ravnest.split.split_stage import SplitStage
from ravnest.split.varying import Varying, refuse_condition
from ravnest.types import is_dense

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """A model as a sequence of stages."""

    stages: tuple[SplitStage, ...]


@dataclass(frozen=True)
class PreparedModel:
    """A captured and measured model, which can be cut repeatedly in different ways."""

    capture: Capture
    layouts: dict[Mode, CutLayout]
    measurements: dict[Mode, Measurement]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Legal cuts of the training graph."""
        return self.layouts["train"].legal

    @property
    def operation_bytes(self) -> int:
        """Activations and their gradients that the largest operation has in memory at once."""
        costs = self.measurements["train"].costs
        return max(2 * (c.gradient_bytes + c.output_bytes) + c.scratch_bytes for c in costs)

    def with_row_blocks(self, counts: Mapping[str, int]) -> PreparedModel:
        """Return the model with these tensors cut into that many blocks of rows, measured again."""
        captured = cut_into_blocks(self.capture, counts)
        return _measured(captured, pass_data=self.measurements["train"].measured)

    def cut(self, cuts: Sequence[int]) -> Split:
        """Return the stages between these cuts of the training graph."""
        _check_cuts(cuts, self.cuts)
        graphs = {"train": assemble(self.layouts["train"], self.measurements["train"], cuts)}
        count = len(cuts) + 1
        holders = _holders(graphs["train"])
        state = self.capture.state
        layout, measurement = self.layouts["eval"], self.measurements["eval"]
        eval_cuts = follow_training(layout, measurement, state, holders, count)
        graphs["eval"] = assemble(
            layout, measurement, eval_cuts, _homes(self.capture.modes["train"], holders)
        )
        for key, stages in _holders(graphs["eval"]).items():
            holders.setdefault(key, set()).update(stages)
        self._place_unused(holders)
        return Split(tuple(self._stage(index, count, graphs, holders) for index in range(count)))

    def _place_unused(self, holders: dict[str, set[int]]) -> None:
        """Assign persistent state that no graph reads to its neighbour's stage in the state_dict."""
        stage = 0
        for key, entry in self.capture.state.tensors.items():
            if key in holders:
                stage = min(holders[key])
            elif entry.persistent:
                holders[key] = {stage}

    def _stage(
        self,
        index: int,
        count: int,
        graphs: Mapping[str, list[StageGraph]],
        holders: Mapping[str, set[int]],
    ) -> SplitStage:
        state = self.capture.state
        own = [key for key in state.tensors if index in holders.get(key, ())]
        spec = StageSpec(
            index=index,
            count=count,
            state=tuple(self._state_spec(key, holders[key]) for key in own),
            graphs={mode: graphs[mode][index] for mode in MODES},
            signature=self._signature(),
            module_versions=state.module_versions if index == 0 else {},
        )
        return SplitStage(spec, {key: state.tensors[key].tensor.detach() for key in own})

    def _state_spec(self, key: str, stages: set[int]) -> StateSpec:
        entry = self.capture.state.tensors[key]
        return StateSpec(
            key=key,
            kind=entry.kind,
            dtype=entry.tensor.dtype,
            shape=tuple(entry.tensor.shape),
            trainable=entry.kind == "parameter" and entry.tensor.requires_grad,
            persistent=entry.persistent,
            names=entry.names,
            positions=self.capture.state.positions(entry.model_names),
            stages=tuple(sorted(stages)),
            strides=_unusual_strides(entry.tensor),
            rows=entry.rows,
        )

    def _signature(self) -> tuple[InputEntry, ...]:
        example = self.capture.example
        values = iter(self.capture.modes["train"].inputs)
        return tuple(
            InputEntry(name, structure, tuple(next(values) for _ in structure.leaf_paths(name)))
            for name, structure in zip(example.names, example.structures, strict=True)
        )


def prepare(
    model: nn.Module,
    example_args: Sequence[Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dim: int = 0,
    pass_data: bool = False,
    varying: Varying | None = None,
    precision: Precision | None = None,
) -> PreparedModel:
    """Capture and measure a model. ``pass_data`` measures times with a real run on the example.

    ``varying`` are dimensions besides the batch whose sizes vary up to those of the example.
    ``precision="bf16"`` captures the model as it computes under autocast.
    """
    captured = capture(
        model,
        example_args,
        example_kwargs,
        batch_dim=batch_dim,
        varying=varying,
        precision=precision,
    )
    with lengths_vary(any(captured.example.varying)):
        for mode in MODES:
            normalise(captured.modes[mode])
    _warn_of_conditions(captured)
    return _measured(captured, pass_data=pass_data)


def _warn_of_conditions(captured: Capture) -> None:
    """Log the lines that decide by the batch size: batches for which they decide otherwise fail.

    Raises ``CaptureError`` for a line because of which a size that is to vary cannot.
    """
    warned: set[str] = set()
    for mode in captured.modes.values():
        dimensions = Dimensions(mode)
        for symbol, bounds in zip(dimensions.symbols, dimensions.ranges(), strict=True):
            accepted = dimensions.accepted(symbol)
            if symbol in dimensions.varying:
                position, dim = dimensions.place(symbol)
                path = captured.example.leaf_paths()[position]
                if bounds.minimum == bounds.maximum:
                    raise refuse_condition(path, dim, accepted.lines)
                _warn_of_sizes(path, dim, set(accepted.lines) - warned, bounds)
                warned.update(accepted.lines)
                continue
            for line in accepted.lines:
                if line not in warned:
                    warned.add(line)
                    logger.warning(
                        "%s\nforward decides by the batch size here, and stages have the branch of the "
                        "example only: batches of other sizes than %s are rejected (use drop_last=True "
                        "for a smaller last batch)",
                        line,
                        bounds,
                    )


def _warn_of_sizes(path: str, dim: int, lines: set[str], bounds: SymbolRange) -> None:
    for line in sorted(lines):
        logger.warning(
            "%s\nforward decides by the size of dimension %d of %s here, and stages have the branch of "
            "the example only: batches of other sizes than %s are rejected",
            line,
            dim,
            path,
            bounds,
        )


def _measured(captured: Capture, *, pass_data: bool) -> PreparedModel:
    """Find the legal cuts of both graphs and measure their operations."""
    layouts: dict[Mode, CutLayout] = {}
    measurements: dict[Mode, Measurement] = {}
    for mode in MODES:
        layouts[mode] = lay_out(captured.modes[mode])
        check_operators(layouts[mode])
        real = pass_data and mode == "train"
        measurements[mode] = measure(captured, layouts[mode], real=real)
    return PreparedModel(captured, layouts, measurements)


def split(
    model: nn.Module,
    example_args: Sequence[Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | Sequence[float] = 2,
    batch_dim: int = 0,
    check: bool = True,
    varying: Varying | None = None,
    precision: Precision | None = None,
) -> Split:
    """Split a model into stages of about equal work, or in the given proportions.

    ``varying``, such as ``{"input_ids": [1]}``, are dimensions besides the batch whose sizes vary
    between batches, up to those of the example. ``precision="bf16"`` is mixed precision: weights stay
    float32, matrix products and convolutions compute in bfloat16, and outputs are float32.

    ``ravnest.clusterize`` plans stages for given machines. With ``check`` the stages are compared with
    the model on the example; ``ExactnessError`` is raised if they differ.
    """
    shares = _shares(stages)
    prepared = prepare(
        model,
        example_args,
        example_kwargs,
        batch_dim=batch_dim,
        varying=varying,
        precision=precision,
    )
    result = prepared.cut(balanced_cuts(prepared, shares))
    if check:
        verify(prepared.capture, [result.stages], operation_bytes=prepared.operation_bytes)
    return result


def _shares(stages: object) -> list[float]:
    """Return the share of the work of each stage."""
    if isinstance(stages, int) and not isinstance(stages, bool):
        return [1.0] * stages
    numbers = list(stages) if isinstance(stages, Sequence) and not isinstance(stages, str) else [None]
    if not all(isinstance(number, int | float) for number in numbers):
        raise SplitError(
            "stages must be a number of stages, such as 2, or a list with a share for each, such as "
            f"[1.0, 2.0]; got {stages!r}"
        )
    return [float(number) for number in numbers if number is not None]


def balanced_cuts(prepared: PreparedModel, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the cuts that bring each stage's work closest to its share (exact dynamic program)."""
    if not shares or min(shares) <= 0:
        raise SplitError(
            f"the shares of the stages must be positive numbers, at least one; got {list(shares)}"
        )
    layout, measurement = prepared.layouts["train"], prepared.measurements["train"]
    cuts = np.array([0, *layout.legal, len(layout.operations)])
    if len(cuts) - 1 < len(shares):
        raise SplitError(
            f"the model can be cut in {len(layout.legal)} places, too few for {len(shares)} stages"
        )
    total = np.cumsum([0.0, *_weights(prepared, layout, measurement)])
    load = total[cuts] / total[-1]
    best = np.full(len(cuts), np.inf)
    best[0] = 0.0
    choices: list[np.ndarray] = []
    for share in np.array(shares) / sum(shares):
        excess = ((load[None, :] - load[:, None]) / share) ** 2
        cost = best[:, None] + share * np.where(np.tri(len(cuts), dtype=bool), np.inf, excess)
        choices.append(cost.argmin(axis=0))
        best = cost.min(axis=0)
    chosen = [len(cuts) - 1]
    for choice in reversed(choices):
        chosen.append(int(choice[chosen[-1]]))
    return tuple(int(cuts[index]) for index in reversed(chosen[1:-1]))


def _weights(prepared: PreparedModel, layout: CutLayout, measurement: Measurement) -> list[float]:
    """Return each operation's weight: its work, and the size of the parameters that it uses first."""
    seen: set[str] = set()
    weights = []
    for cost, keys in zip(measurement.costs, state_keys(layout), strict=True):
        new = [key for key in keys if key not in seen]
        seen.update(new)
        tensors = [prepared.capture.state.tensors[key].tensor for key in new]
        parameters = sum(t.numel() * t.element_size() for t in tensors)
        weights.append(cost.flops + 8.0 * cost.output_bytes + 4.0 * parameters + 1.0)
    return weights


def _holders(graphs: Sequence[StageGraph]) -> dict[str, set[int]]:
    """Return the stages whose graphs read each state key."""
    holders: dict[str, set[int]] = {}
    for index, graph in enumerate(graphs):
        for use in graph.state:
            holders.setdefault(use.key, set()).add(index)
    return holders


def _unusual_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor if they differ from row-major order, else ()."""
    strides = tensor.stride()
    plain = torch.empty(tensor.shape, device="meta").stride()
    return strides if strides != plain and is_dense(tensor.shape, strides) else ()


def _homes(training: ModeCapture, holders: Mapping[str, set[int]]) -> dict[str, int]:
    """Return the stage of each buffer that training writes to; other stages must not hold a copy."""
    written = find_aliases(training.graph).written()
    keys = {training.state_of[root.name] for root in written if root.name in training.state_of}
    return {key: min(holders[key]) for key in keys}


def _check_cuts(cuts: Sequence[int], legal: Sequence[int]) -> None:
    if list(cuts) != sorted(set(cuts)):
        raise SplitError(f"cuts must be in ascending order, got {list(cuts)}")
    wrong = [cut for cut in cuts if cut not in set(legal)]
    if wrong:
        raise SplitError(f"the graph cannot be cut at position {wrong[0]}")
