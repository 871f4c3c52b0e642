"""A stage as a trainable module with the model's parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ravnest.errors import StageInputError
from ravnest.split.deferred import DeferredGradients
from ravnest.split.graph import Mode, StageGraph, StageSpec, StateSpec, ValueSpec
from ravnest.split.program import Program


class StageModule(nn.Module):
    """One stage of a model.

    ``state_dict()`` has the names of the original model; ``train()`` and ``eval()`` switch between
    the two captured graphs. ``forward`` runs on the module's own parameters, or on those it is given,
    so that several versions of the weights can be in flight.
    """

    def __init__(
        self,
        spec: StageSpec,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        """Load a stage. ``tensors`` are not copied: clone them if they are trained elsewhere too."""
        super().__init__()
        self.spec = spec
        self.device = target = torch.device(device)
        """Device that the stage was loaded on."""
        self._places = {
            entry.key: _attach(self, entry, _checked(entry, tensors).to(target)) for entry in spec.state
        }
        self._parameter_places = {
            entry.key: self._places[entry.key] for entry in spec.state if entry.kind == "parameter"
        }
        programs = {mode: Program(graph, target) for mode, graph in spec.graphs.items()}
        self._programs: dict[Mode, Program] = programs
        self._state_places = {
            mode: [self._places[use.key] for use in graph.state] for mode, graph in spec.graphs.items()
        }
        self._accepted: dict[Mode, list[Any]] = {}
        """Shapes and dtypes of the inputs that were accepted last."""

    @property
    def graph(self) -> StageGraph:
        """The graph of the current mode."""
        return self.spec.graphs[self._mode]

    @property
    def _mode(self) -> Mode:
        return "train" if self.training else "eval"

    def forward(
        self,
        *inputs: Any,
        parameters: Mapping[str, torch.Tensor] | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
        deferred: DeferredGradients | None = None,
    ) -> tuple[Any, ...]:
        """Return the outputs in the order of ``graph.outputs``.

        ``parameters`` and ``buffers`` replace the module's own, by key; a recomputation passes clones
        of the buffers, so that running statistics are not updated twice. With ``deferred``, the backward
        pass leaves gradients of weights there instead of computing them.
        """
        mode = self._mode
        kinds = [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in inputs]
        if kinds != self._accepted.get(mode):
            check_inputs(self.spec.graphs[mode], inputs)
            self._accepted[mode] = kinds
        if parameters is None and buffers is None:
            state = [table[leaf] for table, leaf in self._state_places[mode]]
        else:
            given = {**(buffers or {}), **(parameters or {})}
            uses = zip(self.spec.graphs[mode].state, self._state_places[mode], strict=True)
            state = [given[use.key] if use.key in given else table[leaf] for use, (table, leaf) in uses]
        return self._programs[mode](inputs, state, deferred)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the module's current parameters, buffers and constants by key."""
        return {key: table[leaf] for key, (table, leaf) in self._places.items()}

    def replace_buffer(self, key: str, tensor: torch.Tensor) -> None:
        """Replace a buffer by another tensor; autograd graphs in flight keep the previous one."""
        (entry,) = (entry for entry in self.spec.state if entry.key == key)
        assert entry.kind == "buffer", f"{key} is a {entry.kind}"
        _attach(self, entry, tensor)

    def replace_parameter(self, key: str, tensor: torch.Tensor) -> nn.Parameter:
        """Replace a parameter by one with the memory of ``tensor``; graphs in flight keep the old."""
        (entry,) = (entry for entry in self.spec.state if entry.key == key)
        _attach(self, entry, tensor)
        return self.parameters_by_key()[key]

    def parameters_by_key(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters by key; tied ones appear once."""
        return {key: table[leaf] for key, (table, leaf) in self._parameter_places.items()}


def check_inputs(graph: StageGraph, inputs: Sequence[Any]) -> None:
    """Raise ``StageInputError`` for inputs that do not fit the graph, before anything runs.

    The result depends only on the types of the inputs and on the shapes and dtypes of tensors.
    """
    if len(inputs) != len(graph.inputs):
        raise StageInputError(f"the stage takes {len(graph.inputs)} inputs, got {len(inputs)}")
    sizes: dict[str, int] = {}
    for spec, value in zip(graph.inputs, inputs, strict=True):
        if spec.dtype is None:
            if not isinstance(value, int | float):
                raise StageInputError(f"input {spec.name} is a number, got {type(value).__name__}")
            continue
        if not isinstance(value, torch.Tensor):
            raise StageInputError(f"input {spec.name} is a tensor, got {type(value).__name__}")
        if value.dtype != spec.dtype:
            raise StageInputError(f"input {spec.name} has dtype {value.dtype}, expected {spec.dtype}")
        if not _fits(spec, value, sizes):
            raise StageInputError(
                f"input {spec.name} has shape {list(value.shape)}, expected "
                f"[{', '.join(map(str, spec.shape))}]" + _explain_sizes(sizes)
            )
    for bound in graph.symbols:
        size = sizes.get(bound.name)
        upper = bound.maximum
        if size is not None and (size < bound.minimum or (upper is not None and size > upper)):
            raise StageInputError(
                f"the batch size {size} is outside the range that the model was captured for: "
                f"{bound.minimum} to {'any' if upper is None else upper}"
            )


def _fits(spec: ValueSpec, value: torch.Tensor, sizes: dict[str, int]) -> bool:
    if len(spec.shape) != value.dim():
        return False
    for dimension, size in zip(spec.shape, value.shape, strict=True):
        if not dimension.symbol:
            if size != dimension.factor:
                return False
        elif dimension.symbol != "?":
            whole, rest = divmod(size, dimension.factor)
            if rest or sizes.setdefault(dimension.symbol, whole) != whole:
                return False
    return True


def _explain_sizes(sizes: Mapping[str, int]) -> str:
    known = ", ".join(f"{name} is {size}" for name, size in sizes.items())
    return f", where {known}" if known else ""


def _checked(entry: StateSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if entry.key not in tensors:
        raise StageInputError(f"the weights of the stage lack {entry.key}")
    tensor = tensors[entry.key]
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise StageInputError(
            f"{entry.key} has shape {list(tensor.shape)} and dtype {tensor.dtype}, "
            f"expected {list(entry.shape)} and {entry.dtype}"
        )
    return tensor.detach()


def _attach(module: nn.Module, entry: StateSpec, tensor: torch.Tensor) -> tuple[dict[str, Any], str]:
    """Register a tensor under all its names; return the table and key that hold it, also after ``to()``.

    Writes to the modules' tables directly: a user's layer may have the name of a ``nn.Module`` method.
    """
    value = nn.Parameter(tensor, entry.trainable) if entry.kind == "parameter" else tensor
    places: list[tuple[dict[str, Any], str]] = []
    for name in entry.names:
        *path, leaf = name.split(".")
        owner = module
        for part in path:
            child = owner._modules.setdefault(part, nn.Module())
            assert child is not None
            owner = child
        table: dict[str, Any] = owner._parameters if entry.kind == "parameter" else owner._buffers
        table[leaf] = value
        if entry.kind != "parameter" and not entry.persistent:
            owner._non_persistent_buffers_set.add(leaf)
        places.append((table, leaf))
    return places[0]
