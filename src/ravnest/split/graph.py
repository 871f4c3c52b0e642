"""A stage as data: the types of the stage format (docs/stage-format.md).

``split/encoding.py`` decodes JSON into them. Types and bounds of single fields are declared here and
checked by msgspec while it decodes; ``StageSpec.check`` makes the checks that span several fields.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct, field

from ravnest.errors import StageFormatError
from ravnest.split.limits import (
    MAX_DIMENSIONS,
    MAX_OPERATIONS,
    MAX_STATE_TENSORS,
    MAX_SYMBOLS,
    MAX_TEXT,
    MAX_VALUES,
)
from ravnest.split.structure import Structure
from ravnest.types import is_dense

Mode = Literal["train", "eval"]
MODES: tuple[Mode, ...] = ("train", "eval")
Kind = Literal["parameter", "buffer", "constant"]
MAX_STAGES = 10_000
"""Upper bound of a stage count: a forged count must not cost memory."""
MAX_MODULES = 1_000_000
MAX_MODULE_VERSION = 2**31 - 1

Size = Annotated[int, Meta(ge=0, le=2**48)]
"""Size of a dimension of a tensor, or a stride."""
ModuleVersion = Annotated[int, Meta(ge=0, le=MAX_MODULE_VERSION)]


class Ref(Struct, frozen=True):
    """Reference to the value of an input, a state tensor or an operation, by name."""

    name: str


class StageDevice(Struct, frozen=True):
    """Device argument that stands for the device the stage is loaded on."""


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


class Operation(Struct, frozen=True):
    """One call of an allow-listed operator."""

    name: str
    target: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    no_grad: bool = False
    """True if the model runs it under ``torch.no_grad()``."""

    def refs(self) -> Iterator[str]:
        """Yield the names of the values that the operation reads."""
        yield from refs_in(self.args)
        yield from refs_in(tuple(value for _, value in self.kwargs))


class Dimension(Struct, frozen=True):
    """Size of one dimension: a number, or ``factor`` times a symbol that may vary."""

    factor: int
    symbol: str = ""
    """Empty if the size is ``factor`` itself; ``?`` if any size is accepted."""

    def __str__(self) -> str:
        if not self.symbol or self.symbol == "?":
            return self.symbol or str(self.factor)
        return self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"


class ValueSpec(Struct, frozen=True):
    """A value that enters a stage."""

    name: str
    dtype: torch.dtype | None
    """None for a plain number (a size that a later stage needs)."""
    shape: tuple[Dimension, ...] = ()
    gradient: bool = False
    """True if a gradient flows back to the previous stage."""


class OutputSpec(Struct, frozen=True):
    """A value that leaves a stage as ``name``: a reference, or a constant of the model."""

    name: str
    value: Argument


class StateUse(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Use of the state tensor ``key`` in a graph, where it is called ``name``."""

    name: str
    key: str


class SymbolRange(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A size that may vary between micro-batches, with the sizes that the graph was captured for."""

    name: str
    minimum: int
    maximum: int | None
    modulus: Annotated[int, Meta(ge=1, le=2**48)] = 1
    """Divisor of the sizes that leaves ``remainder``."""
    remainder: Size = 0
    excluded: tuple[Size, ...] = ()
    """Single sizes for which forward takes another branch."""
    length: bool = False
    """True for a dimension besides the batch, such as the length of the samples."""

    def accepts(self, size: int) -> bool:
        """Return True if the graph computes what the model computes for this size."""
        return (
            size >= self.minimum
            and (self.maximum is None or size <= self.maximum)
            and size % self.modulus == self.remainder
            and size not in self.excluded
        )

    def __str__(self) -> str:
        upper = "any" if self.maximum is None else self.maximum
        text = f"{self.minimum} to {upper}"
        if self.modulus > 1:
            text += f", with remainder {self.remainder} when divided by {self.modulus}"
        if self.excluded:
            text += f", but not {', '.join(map(str, self.excluded))}"
        return text


class StageGraph(Struct, frozen=True):
    """The computation of a stage in one mode."""

    inputs: tuple[ValueSpec, ...]
    state: tuple[StateUse, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[OutputSpec, ...]
    structure: Structure | None = None
    """Nesting of the model's output; only the last stage has it."""
    symbols: tuple[SymbolRange, ...] = ()
    """Sizes that may vary between micro-batches."""


class RowBlock(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Block of a tensor: rows ``first`` to ``stop - 1`` of ``total`` rows."""

    first: Size
    stop: Size
    total: Size

    def name_in(self, name: str) -> str:
        """Return the name of this block of the tensor ``name``."""
        return f"{name}{self._suffix}"

    def name_of_whole(self, name: str) -> str:
        """Return the name of the whole tensor, from that of this block."""
        if not name.endswith(self._suffix):
            raise StageFormatError(f"{name!r} is not the name of the rows {self.first} to {self.stop}")
        return name[: -len(self._suffix)]

    @property
    def _suffix(self) -> str:
        return f".rows_{self.first}_{self.stop}"


class StateSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A parameter, buffer or constant of the model that this stage holds."""

    key: str
    kind: Kind
    dtype: torch.dtype
    shape: tuple[Size, ...]
    trainable: bool
    persistent: bool
    """True if it is part of the model's ``state_dict``."""
    names: tuple[str, ...]
    """All names of the tensor in the model, several for a tied weight. The first is the key."""
    positions: tuple[Annotated[int, Meta(ge=-1)], ...]
    """Position of each name in the model's ``state_dict``; -1 if it is not in it."""
    stages: tuple[int, ...]
    """Stages that hold the tensor, ascending. The first owns it; the others hold replicas."""
    strides: tuple[Size, ...] = ()
    """Memory layout, which affects the choice of kernels (channels last); empty for row-major order."""
    rows: RowBlock | None = None
    """Rows of the model's tensor that this block holds; None for a whole tensor. The names of a block
    are those of the tensor with the range appended, the positions are those of the tensor."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the whole tensor in the model."""
        return self.names if self.rows is None else tuple(map(self.rows.name_of_whole, self.names))

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class InputEntry(Struct, frozen=True):
    """One argument of the model's forward."""

    name: str
    structure: Structure
    values: tuple[str, ...]
    """Names of its tensors in the graph."""


class StageSpec(Struct, frozen=True):
    """Complete description of a stage, without its weights."""

    index: int
    count: int
    state: tuple[StateSpec, ...]
    graphs: dict[Mode, StageGraph]
    signature: tuple[InputEntry, ...]
    """The model's inputs in the order of forward's signature; the same in every stage."""
    module_versions: dict[str, ModuleVersion] = field(default_factory=dict)
    """Version of each module by path, from the ``state_dict``'s metadata; first stage only."""

    @property
    def has_gradients(self) -> bool:
        """False if the stage trains nothing and sends no gradient back: it has no backward pass."""
        return any(entry.trainable for entry in self.state) or any(
            value.gradient for value in self.graphs["train"].inputs
        )

    def check(self) -> None:
        """Raise ``StageFormatError`` if the stage is inconsistent. Nothing of it has run yet."""
        if not 0 <= self.index < self.count <= MAX_STAGES:
            raise StageFormatError(f"stage {self.index} of {self.count} does not exist")
        _check_count("state tensors", len(self.state), MAX_STATE_TENSORS)
        _check_count("inputs of the model", len(self.signature), MAX_VALUES)
        names = [name for entry in self.state for name in entry.names]
        if len(set(names)) != len(names):
            raise StageFormatError("a state tensor is listed twice")
        for entry in self.state:
            self._check_state(entry)
        if set(self.graphs) != set(MODES):
            raise StageFormatError(f"a stage needs the graphs {MODES}, but has {sorted(self.graphs)}")
        self._check_module_versions()
        given = self._check_signature()
        for mode, graph in self.graphs.items():
            _check_graph(mode, graph, {entry.key for entry in self.state}, self.index == self.count - 1)
            if self.index == 0 and not {value.name for value in graph.inputs} <= given:
                raise StageFormatError(f"{mode} graph: it takes an input that the model does not have")

    def _check_state(self, entry: StateSpec) -> None:
        key = entry.key
        _check_count(f"dimensions of {key!r}", len(entry.shape), MAX_DIMENSIONS)
        if not entry.names or entry.names[0] != key or len(entry.positions) != len(entry.names):
            raise StageFormatError(f"the names of {key!r} are malformed")
        if not all(_is_state_name(part) for name in entry.names for part in name.split(".")):
            raise StageFormatError(f"{key!r} is not the name of a parameter or buffer")
        if entry.strides and (
            len(entry.strides) != len(entry.shape) or not is_dense(entry.shape, entry.strides)
        ):
            raise StageFormatError(f"the strides of {key!r} do not fit its shape")
        _check_rows(entry)
        exist = all(0 <= stage < self.count for stage in entry.stages)
        ascend = list(entry.stages) == sorted(set(entry.stages))
        if self.index not in entry.stages or not exist or not ascend:
            raise StageFormatError(f"the stages that hold {key!r} are malformed")
        if entry.trainable and (entry.kind != "parameter" or not _differentiable(entry.dtype)):
            raise StageFormatError(f"{key!r} cannot be trained: it is a {entry.dtype} {entry.kind}")

    def _check_module_versions(self) -> None:
        if self.module_versions and self.index > 0:
            raise StageFormatError("only the first stage lists the versions of modules")
        if len(self.module_versions) > MAX_MODULES:
            raise StageFormatError(f"the model has more than {MAX_MODULES} modules")
        for path in self.module_versions:
            if path and not all(part and part.isprintable() for part in path.split(".")):
                raise StageFormatError(f"{path!r} is not the path of a module")

    def _check_signature(self) -> set[str]:
        """Return the names of the model's input values."""
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


def _check_rows(entry: StateSpec) -> None:
    rows = entry.rows
    if rows is None:
        return
    inside = 0 <= rows.first < rows.stop <= rows.total
    if not inside or not entry.shape or entry.shape[0] != rows.stop - rows.first or entry.strides:
        raise StageFormatError(f"the rows of {entry.key!r} do not fit its shape")
    if not all(entry.model_names):
        raise StageFormatError(f"{entry.key!r} is a block of a tensor without a name")


def _is_state_name(part: str) -> bool:
    """Return True for one part of a tensor's name; keys of a ``ModuleDict`` need not be identifiers."""
    return 0 < len(part) <= MAX_TEXT and part.isprintable() and not part.startswith("__")


def _is_value_name(name: str) -> bool:
    return len(name) <= MAX_TEXT and name.isidentifier()


def _differentiable(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def refs_in(argument: Argument) -> Iterator[str]:
    """Yield the names of the values that an argument refers to."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from refs_in(item)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise StageFormatError(f"there are {count} {what}; at most {most} are allowed")


def _check_counts(graph: StageGraph) -> None:
    _check_count("operations", len(graph.operations), MAX_OPERATIONS)
    _check_count("inputs", len(graph.inputs), MAX_VALUES)
    _check_count("outputs", len(graph.outputs), MAX_VALUES)
    _check_count("uses of state tensors", len(graph.state), MAX_STATE_TENSORS)
    _check_count("symbols", len(graph.symbols), MAX_SYMBOLS)
    for value in graph.inputs:
        _check_count(f"dimensions of {value.name!r}", len(value.shape), MAX_DIMENSIONS)


def _check_graph(mode: Mode, graph: StageGraph, keys: set[str], last: bool) -> None:
    try:
        _check_counts(graph)
        _check_names(graph, keys)
        _check_inputs(graph)
        outputs = {output.name for output in graph.outputs}
        if not last and len(outputs) != len(graph.outputs):
            raise StageFormatError("two outputs have the same name")
        if last != (graph.structure is not None):
            raise StageFormatError("only the last stage has an output structure")
        if graph.structure is not None:
            leaves = list(graph.structure.leaf_paths(""))
            if len(leaves) != len(graph.outputs):
                raise StageFormatError("the outputs do not fill the output structure")
    except StageFormatError as error:
        raise StageFormatError(f"{mode} graph: {error}") from error


def _check_inputs(graph: StageGraph) -> None:
    for value in graph.inputs:
        if value.gradient and not _differentiable(value.dtype):
            raise StageFormatError(
                f"no gradient can flow to the input {value.name!r} of dtype {value.dtype}"
            )
    if len({symbol.name for symbol in graph.symbols}) != len(graph.symbols):
        raise StageFormatError("a symbol is listed twice")
    for symbol in graph.symbols:
        if symbol.minimum < 0 or (symbol.maximum is not None and symbol.maximum < symbol.minimum):
            raise StageFormatError(f"the bounds of the symbol {symbol.name!r} leave no size")
        if symbol.remainder >= symbol.modulus:
            raise StageFormatError(f"the remainder of the symbol {symbol.name!r} leaves no size")
        _check_count(f"excluded sizes of {symbol.name!r}", len(symbol.excluded), MAX_DIMENSIONS)


def _check_names(graph: StageGraph, keys: set[str]) -> None:
    """Check that names are unique identifiers, and that values are defined before they are read."""
    known: set[str] = set()

    def define(name: str) -> None:
        if not _is_value_name(name) or name in known:
            shown = reprlib.repr(name)
            raise StageFormatError(f"the name {shown} is used twice or is not an identifier")
        known.add(name)

    def read(reader: str, names: Iterator[str]) -> None:
        for name in names:
            if name not in known:
                raise StageFormatError(f"{reader} reads {name!r}, which is not defined before it")

    for name in [value.name for value in graph.inputs] + [use.name for use in graph.state]:
        define(name)
    if unknown := {use.key for use in graph.state} - keys:
        raise StageFormatError(f"{min(unknown)!r} is not in the stage's state")
    for operation in graph.operations:
        read(operation.name, operation.refs())
        define(operation.name)
    for output in graph.outputs:
        read(f"output {output.name}", refs_in(output.value))
