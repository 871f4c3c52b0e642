"""A stage as a trainable module with the model's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ravnest.errors import StageInputError
from ravnest.split.deferred import DeferredGradients
from ravnest.split.graph import InputEntry, Mode, StageGraph, StageSpec, StateSpec, ValueSpec
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
            check_inputs(self.spec.graphs[mode], inputs, shown_names(self.spec.signature))
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


def shown_names(signature: Sequence[InputEntry]) -> dict[str, str]:
    """Return the names of the model's inputs, as its forward has them, by their names in graphs."""
    return {
        value: path
        for entry in signature
        for value, path in zip(entry.values, entry.structure.leaf_paths(entry.name), strict=True)
    }


def check_inputs(
    graph: StageGraph, inputs: Sequence[Any], names: Mapping[str, str] | None = None
) -> None:
    """Raise ``StageInputError`` for inputs that do not fit the graph, before anything runs.

    The result depends only on the types of the inputs and on the shapes and dtypes of tensors.
    ``names`` are those that messages use for values of the graph.
    """

    def shown(name: str) -> str:
        return (names or {}).get(name, name)

    if len(inputs) != len(graph.inputs):
        raise StageInputError(f"the stage takes {len(graph.inputs)} inputs, got {len(inputs)}")
    sizes: dict[str, int] = {}
    for spec, value in zip(graph.inputs, inputs, strict=True):
        if spec.dtype is None:
            if not isinstance(value, int | float):
                raise StageInputError(
                    f"input {shown(spec.name)} is a number, got {type(value).__name__}"
                )
            continue
        if not isinstance(value, torch.Tensor):
            raise StageInputError(f"input {shown(spec.name)} is a tensor, got {type(value).__name__}")
        if value.dtype != spec.dtype:
            raise StageInputError(
                f"input {shown(spec.name)} has dtype {value.dtype}, expected {spec.dtype}"
            )
        if not _fits(spec, value, sizes):
            raise StageInputError(
                f"input {shown(spec.name)} has shape {list(value.shape)}, expected "
                f"[{', '.join(map(str, spec.shape))}]"
                + _explain_sizes(sizes)
                + _explain_fixed(spec, value, shown(spec.name))
            )
    _check_sizes(graph, inputs, sizes, shown)


def _check_sizes(
    graph: StageGraph, inputs: Sequence[Any], sizes: Mapping[str, int], shown: Callable[[str], str]
) -> None:
    """Raise ``StageInputError`` for sizes that the graph was not captured for."""
    for bound in graph.symbols:
        size = sizes.get(bound.name)
        if size is not None and not bound.accepts(size):
            spec, value = next(_of_symbol(graph, inputs, bound.name))
            where = f"the input {shown(spec.name)} has shape {list(value.shape)}: "
            if bound.length:
                dim = next(k for k, each in enumerate(spec.shape) if each.symbol == bound.name)
                raise StageInputError(
                    f"{where}the size {size} of dimension {dim} is not one that the model was captured "
                    f"for ({bound}). The example inputs have the largest size that stages take: give a "
                    "larger example, or crop the samples"
                )
            raise StageInputError(
                f"{where}the batch size {size} is "
                f"not one that the model was captured for ({bound}). Its forward takes another path for "
                "other sizes: use drop_last=True in the DataLoader, another batch size, or a forward "
                "without conditions on the batch size"
            )


def _of_symbol(
    graph: StageGraph, inputs: Sequence[Any], symbol: str
) -> Iterator[tuple[ValueSpec, torch.Tensor]]:
    """Yield the inputs with a dimension of this symbol."""
    for spec, value in zip(graph.inputs, inputs, strict=True):
        if any(dimension.symbol == symbol for dimension in spec.shape):
            yield spec, value


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


def _explain_fixed(spec: ValueSpec, value: torch.Tensor, name: str) -> str:
    """Say that a size besides the batch is fixed, if this is the reason why a tensor does not fit."""
    for dim, (dimension, size) in enumerate(zip(spec.shape, value.shape, strict=False)):
        if dim and len(spec.shape) == value.dim() and not dimension.symbol and size != dimension.factor:
            return (
                f". The size of dimension {dim} is fixed at {dimension.factor}, as in the example "
                f"inputs: name it in varying={{{name!r}: [{dim}]}} when the model is split, or pad to it"
            )
    return ""


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
