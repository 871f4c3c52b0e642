"""A stage as data: the values that the stage format (docs/stage-format.md) is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from ravnest.errors import StageFormatError
from ravnest.split.structure import Structure

Mode = Literal["train", "eval"]
MODES: tuple[Mode, ...] = ("train", "eval")
Kind = Literal["parameter", "buffer", "constant"]
MAX_STAGES = 10_000
"""More than any pool has nodes; a forged count must not cost memory."""
MAX_MODULES = 1_000_000
MAX_MODULE_VERSION = 2**31 - 1


@dataclass(frozen=True)
class Ref:
    """The value that an input, a state tensor or an operation of this name gives."""

    name: str


@dataclass(frozen=True)
class StageDevice:
    """A device argument: whichever device the stage is loaded on."""


Argument = (
    None
    | bool
    | int
    | float
    | str
    | Ref
    | StageDevice
    | torch.dtype
    | torch.layout
    | torch.memory_format
    | tuple["Argument", ...]
)


@dataclass(frozen=True)
class Operation:
    """One call of an allow-listed operator."""

    name: str
    target: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    no_grad: bool = False
    """The model runs it under ``torch.no_grad()``."""

    def refs(self) -> Iterator[str]:
        """Names of the values it reads."""
        yield from refs_in(self.args)
        yield from refs_in(tuple(value for _, value in self.kwargs))


@dataclass(frozen=True)
class Dimension:
    """A size: ``factor`` times a named size that may differ between micro-batches, or a number."""

    factor: int
    symbol: str = ""
    """Empty: the size is ``factor``. ``?``: any size."""

    def __str__(self) -> str:
        if not self.symbol or self.symbol == "?":
            return self.symbol or str(self.factor)
        return self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"


@dataclass(frozen=True)
class ValueSpec:
    """A value that enters a stage."""

    name: str
    dtype: torch.dtype | None
    """None: a plain number (a size that a later stage needs)."""
    shape: tuple[Dimension, ...] = ()
    gradient: bool = False
    """A gradient flows back along it."""


@dataclass(frozen=True)
class OutputSpec:
    """A value that leaves a stage under ``name``: a reference, or a constant of the model."""

    name: str
    value: Argument


@dataclass(frozen=True)
class StateUse:
    """The graph knows the state tensor ``key`` as ``name``."""

    name: str
    key: str


@dataclass(frozen=True)
class SymbolRange:
    """A size that may differ between micro-batches, and the bounds that the capture found for it."""

    name: str
    minimum: int
    maximum: int | None


@dataclass(frozen=True)
class StageGraph:
    """What a stage computes in one mode."""

    inputs: tuple[ValueSpec, ...]
    state: tuple[StateUse, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[OutputSpec, ...]
    structure: Structure | None = None
    """How the outputs form the model's output; only the last stage has it."""
    symbols: tuple[SymbolRange, ...] = ()
    """Sizes that may differ between micro-batches."""


@dataclass(frozen=True)
class StateSpec:
    """A parameter, buffer or constant of the model that this stage holds."""

    key: str
    kind: Kind
    dtype: torch.dtype
    shape: tuple[int, ...]
    trainable: bool
    persistent: bool
    """It is part of the model's ``state_dict``."""
    names: tuple[str, ...]
    """All names the model gives it; more than one for tied weights. The first is the key."""
    positions: tuple[int, ...]
    """Where each name stands in the model's ``state_dict``; -1 for one that is not in it."""
    stages: tuple[int, ...]
    """Stages that hold it, ascending. The first owns it; the others hold replicas."""
    strides: tuple[int, ...] = ()
    """Order of its elements in memory, which decides on kernels (channels last); empty: row by row."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class InputEntry:
    """One argument of the model's forward, and its structure."""

    name: str
    structure: Structure
    values: tuple[str, ...]
    """Names of the graph values of its leaves."""


@dataclass(frozen=True)
class StageSpec:
    """Everything about a stage but its weights."""

    index: int
    count: int
    state: tuple[StateSpec, ...]
    graphs: dict[Mode, StageGraph]
    signature: tuple[InputEntry, ...]
    """The model's inputs in the order of forward's signature; the same in every stage."""
    module_versions: dict[str, int] = field(default_factory=dict)
    """Version of each module by its path, as the model's ``state_dict`` has it; first stage only."""

    def check(self) -> None:
        """Refuse a stage that does not hang together, before anything runs."""
        if not 0 <= self.index < self.count <= MAX_STAGES:
            raise StageFormatError(f"stage {self.index} of {self.count} does not exist")
        names = [name for entry in self.state for name in entry.names]
        if len(set(names)) != len(names):
            raise StageFormatError("a state tensor is listed twice")
        for entry in self.state:
            self._check_state(entry)
        if set(self.graphs) != set(MODES):
            raise StageFormatError(f"a stage needs the graphs {MODES}, has {sorted(self.graphs)}")
        self._check_module_versions()
        given = self._check_signature()
        for mode, graph in self.graphs.items():
            _check_graph(mode, graph, {entry.key for entry in self.state}, self.index == self.count - 1)
            if self.index == 0 and not {value.name for value in graph.inputs} <= given:
                raise StageFormatError(f"{mode} graph: it takes an input that the model does not have")

    def _check_state(self, entry: StateSpec) -> None:
        exist = all(0 <= stage < self.count for stage in entry.stages)
        ascend = list(entry.stages) == sorted(set(entry.stages))
        if self.index not in entry.stages or not exist or not ascend:
            raise StageFormatError(f"the stages that hold {entry.key!r} are malformed")
        if entry.trainable and (entry.kind != "parameter" or not _differentiable(entry.dtype)):
            raise StageFormatError(
                f"{entry.key!r} cannot be trained: it is a {entry.dtype} {entry.kind}"
            )
        if min(entry.positions) < -1:
            raise StageFormatError(f"{entry.key!r} has no such place in the state_dict")

    def _check_module_versions(self) -> None:
        if self.module_versions and self.index > 0:
            raise StageFormatError("only the first stage says which versions the modules have")
        if len(self.module_versions) > MAX_MODULES:
            raise StageFormatError(f"the model has more than {MAX_MODULES} modules")
        for path, version in self.module_versions.items():
            if path and not all(part and part.isprintable() for part in path.split(".")):
                raise StageFormatError(f"{path!r} is not the path of a module")
            if not 0 <= version <= MAX_MODULE_VERSION:
                raise StageFormatError(f"the module {path!r} cannot have version {version}")

    def _check_signature(self) -> set[str]:
        """The names of the values that the model's inputs give."""
        entries = {entry.name for entry in self.signature}
        values = [value for entry in self.signature for value in entry.values]
        leaves = [len(list(entry.structure.leaf_paths(""))) for entry in self.signature]
        if (
            len(entries) != len(self.signature)
            or len(set(values)) != len(values)
            or leaves != [len(entry.values) for entry in self.signature]
        ):
            raise StageFormatError("the signature of the model is malformed")
        return set(values)


def _differentiable(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def refs_in(argument: Argument) -> Iterator[str]:
    """Names of the values that an argument is made of."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from refs_in(item)


def _check_graph(mode: Mode, graph: StageGraph, keys: set[str], last: bool) -> None:
    try:
        _check_names(graph, keys)
        _check_inputs(graph)
        outputs = {output.name for output in graph.outputs}
        if not last and len(outputs) != len(graph.outputs):
            raise StageFormatError("two outputs have the same name")
        if last != (graph.structure is not None):
            raise StageFormatError("only the last stage says how outputs are put together")
        if graph.structure is not None:
            leaves = list(graph.structure.leaf_paths(""))
            if len(leaves) != len(graph.outputs):
                raise StageFormatError("the outputs do not fill the output structure")
    except StageFormatError as error:
        raise StageFormatError(f"{mode} graph: {error}") from error


def _check_inputs(graph: StageGraph) -> None:
    for value in graph.inputs:
        if value.gradient and not _differentiable(value.dtype):
            raise StageFormatError(f"no gradient flows along {value.name!r}, a {value.dtype}")
    if len({symbol.name for symbol in graph.symbols}) != len(graph.symbols):
        raise StageFormatError("a size is listed twice")
    for symbol in graph.symbols:
        if symbol.minimum < 0 or (symbol.maximum is not None and symbol.maximum < symbol.minimum):
            raise StageFormatError(f"no size lies within the bounds of {symbol.name!r}")


def _check_names(graph: StageGraph, keys: set[str]) -> None:
    """Every name is new and plain, and every value is made before it is read."""
    known: set[str] = set()

    def define(name: str) -> None:
        if not name.isidentifier() or name in known:
            raise StageFormatError(f"{name!r} is not a new, plain name")
        known.add(name)

    def read(reader: str, names: Iterator[str]) -> None:
        for name in names:
            if name not in known:
                raise StageFormatError(f"{reader} reads {name!r}, which nothing before it gives")

    for name in [value.name for value in graph.inputs] + [use.name for use in graph.state]:
        define(name)
    if unknown := {use.key for use in graph.state} - keys:
        raise StageFormatError(f"{min(unknown)!r} is not in the stage's state")
    for operation in graph.operations:
        read(operation.name, operation.refs())
        define(operation.name)
    for output in graph.outputs:
        read(f"output {output.name}", refs_in(output.value))
