"""Cut a captured graph into the graphs of its stages.

Stages form a chain: every value that a later stage needs passes through the stages between. Gradients
come back along the same chain. Autograd then sums them in the same order as in the unsplit model, so
the split is exact to the last bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ravnest.errors import CaptureError, OperatorError, SplitError
from ravnest.split.aliases import Aliases, find_aliases
from ravnest.split.casts import is_state_cast
from ravnest.split.cuts import CutLayout
from ravnest.split.dimensions import Dimensions, expression_of
from ravnest.split.graph import (
    Argument,
    Operation,
    OutputSpec,
    Ref,
    StageDevice,
    StageGraph,
    StateUse,
    ValueSpec,
)
from ravnest.split.measure import Measurement
from ravnest.split.normalise import NO_GRAD, is_size
from ravnest.split.operators import name_of
from ravnest.split.source import line_of_trace_text

aten = torch.ops.aten


def assemble(
    layout: CutLayout,
    measurement: Measurement,
    cuts: Sequence[int],
    homes: Mapping[str, int] | None = None,
) -> list[StageGraph]:
    """Return the graphs of the stages between ascending ``cuts``; a stage between equal cuts is empty.

    ``homes`` maps a state tensor to the stage that updates it. Later stages that read it receive its
    value over the chain.
    """
    cutter = _Cutter(layout, measurement, cuts, homes or {})
    graphs: list[StageGraph] = []
    wanted: list[fx.Node] = []
    for index in reversed(range(len(cuts) + 1)):
        builder = _StageBuilder(cutter, index)
        graphs.append(builder.build(wanted))
        wanted = builder.requested
    graphs.reverse()
    return graphs


def check_operators(layout: CutLayout) -> None:
    """Raise ``OperatorError``, with the user's line, for an operation that stages cannot use.

    Call it before anything of the graph runs: such operations can fail with unclear errors outside of
    forward.
    """
    for node in layout.operations:
        _operator_name(node)


def _operator_name(node: fx.Node) -> str:
    try:
        return name_of(node.target)  # type: ignore[arg-type]
    except OperatorError as error:
        line = line_of_trace_text(node.meta.get("stack_trace"))
        raise OperatorError(f"{line}\n{error}" if line else str(error)) from error


class _Cutter:
    """Data that all stages of one graph share."""

    def __init__(
        self,
        layout: CutLayout,
        measurement: Measurement,
        cuts: Sequence[int],
        homes: Mapping[str, int],
    ) -> None:
        self.layout = layout
        self.measurement = measurement
        self.bounds = [0, *cuts, len(layout.operations)]
        self.aliases: Aliases = find_aliases(layout.capture.graph)
        self.dimensions = Dimensions(layout.capture)
        self.written: list[set[fx.Node]] = [set() for _ in range(len(cuts) + 1)]
        for writer, root in self.aliases.writes:
            self.written[self.stage_at(layout.position[writer])].add(root)
        self.relayed = list(self._relays(homes))

    def stage_at(self, position: int) -> int:
        """Return the stage of the operation at a position."""
        return bisect_right(self.bounds, position) - 1

    def entering(self, index: int) -> list[fx.Node]:
        """Return the values that enter a stage, in program order."""
        if index > 0:
            relayed = [node for node, home, last in self.relayed if home < index <= last]
            return [*self.layout.crossing(self.bounds[index]), *relayed]
        capture = self.layout.capture
        return [n for n in capture.graph.nodes if n.name in capture.inputs and n.users]

    def leaving(self, index: int) -> list[fx.Node]:
        """Return the values that leave a stage, in program order."""
        return self.entering(index + 1)

    def _relays(self, homes: Mapping[str, int]) -> Iterator[tuple[fx.Node, int, int]]:
        """Yield state that other stages read: the value, its home, and the last stage that reads it."""
        for node in self.layout.capture.graph.nodes:
            key = self.layout.capture.state_of.get(node.name)
            if node.op != "placeholder" or key is None or key not in homes:
                continue
            readers = [stage for user in node.users for stage in self._stages_of_user(user)]
            if readers and min(readers) < homes[key]:
                raise SplitError(
                    f"evaluation reads the buffer {key} in stage {min(readers)}, before stage "
                    f"{homes[key]}, which updates it in training: choose other cuts"
                )
            if readers and max(readers) > homes[key]:
                yield node, homes[key], max(readers)

    def _stages_of_user(self, user: fx.Node) -> Iterator[int]:
        if is_state_cast(user):
            for reader in user.users:
                yield from self._stages_of_user(reader)
        else:
            output = user.op == "output"
            yield self.last if output else self.stage_at(self.layout.position[user])

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return len(self.bounds) - 2


class _StageBuilder:
    """Builds the graph of one stage."""

    def __init__(self, cutter: _Cutter, index: int) -> None:
        self._cutter = cutter
        self._capture = cutter.layout.capture
        self._index = index
        self._names: dict[fx.Node, str] = {}
        self._inputs: list[fx.Node] = []
        self._state: list[StateUse] = []
        self._operations: list[Operation] = []
        self.requested: list[fx.Node] = []
        """Sizes that this stage cannot compute and needs from the previous stage."""

    def build(self, wanted: list[fx.Node]) -> StageGraph:
        """Return the stage's graph; ``wanted`` are sizes that the next stage requested."""
        for node in self._cutter.entering(self._index):
            self._enter(node)
        begin, end = self._cutter.bounds[self._index : self._index + 2]
        for node in self._cutter.layout.operations[begin:end]:
            self._emit(node)
        last = self._index == self._cutter.last
        outputs = self._model_outputs() if last else self._outputs(wanted)
        return StageGraph(
            inputs=tuple(self._describe(node) for node in self._inputs),
            state=tuple(self._state),
            operations=tuple(self._operations),
            outputs=tuple(outputs),
            structure=self._capture.structure if last else None,
            symbols=self._cutter.dimensions.ranges(),
        )

    def _enter(self, node: fx.Node) -> None:
        self._inputs.append(node)
        self._names[node] = node.name
        if self._cutter.aliases.root[node] in self._cutter.written[self._index]:
            own = f"{node.name}__own"  # a received tensor must not be written to
            self._operations.append(Operation(own, name_of(aten.clone.default), (Ref(node.name),)))
            self._names[node] = own

    def _emit(self, node: fx.Node) -> None:
        operation = Operation(
            name=node.name,
            target=_operator_name(node),
            args=tuple(self._argument(argument) for argument in node.args),
            kwargs=tuple((k, self._argument(v)) for k, v in node.kwargs.items()),
            no_grad=bool(node.meta.get(NO_GRAD)),
        )
        self._operations.append(operation)
        self._names[node] = node.name

    def _argument(self, value: Any) -> Argument:
        match value:
            case fx.Node():
                return self._reference(value)
            case None | bool() | int() | float() | str():
                return value
            case torch.dtype() | torch.layout() | torch.memory_format():
                return value
            case torch.device():
                return StageDevice()
            case list() | tuple():
                return tuple(self._argument(item) for item in value)
        raise CaptureError(f"an operator takes a {type(value).__name__}, which stages cannot represent")

    def _reference(self, node: fx.Node) -> Argument:
        if node in self._names:
            return Ref(self._names[node])
        if node.op == "placeholder":
            key = self._capture.state_of.get(node.name)
            assert key is not None, f"input {node} does not reach stage {self._index}"
            self._state.append(StateUse(node.name, key))
            self._names[node] = node.name
            return Ref(node.name)
        if is_state_cast(node):
            self._emit(node)
            return Ref(node.name)
        assert is_size(node), f"{node} does not reach stage {self._index}"
        return self._size(node)

    def _size(self, node: fx.Node) -> Argument:
        """Return a size: constant, computed here, read from an input, or from the previous stage."""
        value = node.meta["val"]
        known = value if isinstance(value, int | float) else value.node.maybe_as_int()
        if known is not None:
            return known
        if self._can_compute(node):
            self._emit(node)
        elif (found := self._find_dimension(value)) is not None:
            tensor, dim = found
            args = (Ref(self._names[tensor]), dim)
            self._operations.append(Operation(node.name, name_of(aten.sym_size.int), args))
            self._names[node] = node.name
        else:
            self._inputs.append(node)
            self._names[node] = node.name
            self.requested.append(node)
        return Ref(self._names[node])

    def _can_compute(self, node: fx.Node) -> bool:
        return all(
            argument in self._names
            or (is_size(argument) and self._can_find(argument))
            or argument.name in self._capture.state_of
            for argument in node.all_input_nodes
        )

    def _can_find(self, node: fx.Node) -> bool:
        return self._can_compute(node) or self._find_dimension(node.meta["val"]) is not None

    def _find_dimension(self, value: Any) -> tuple[fx.Node, int] | None:
        if not isinstance(value, torch.SymInt):
            return None
        for node in self._inputs:
            tensor = node.meta["val"]
            if isinstance(tensor, torch.Tensor):
                for dim, size in enumerate(tensor.shape):
                    if expression_of(size) == value.node.expr:
                        return node, dim
        return None

    def _outputs(self, wanted: list[fx.Node]) -> list[OutputSpec]:
        nodes = [*self._cutter.leaving(self._index), *wanted]
        return [OutputSpec(node.name, self._reference(node)) for node in nodes]

    def _model_outputs(self) -> list[OutputSpec]:
        output = next(node for node in self._capture.graph.nodes if node.op == "output")
        leaves = output.args[0]
        assert isinstance(leaves, list | tuple)
        paths = self._capture.structure.leaf_paths("output")
        values = [self._argument(leaf) for leaf in leaves]
        return [OutputSpec(path, value) for path, value in zip(paths, values, strict=True)]

    def _describe(self, node: fx.Node) -> ValueSpec:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return ValueSpec(node.name, None)
        cut = self._cutter.bounds[self._index]
        gradient = self._cutter.measurement.carries_gradient(node, cut)
        return ValueSpec(node.name, value.dtype, self._cutter.dimensions.of(value.shape), gradient)
