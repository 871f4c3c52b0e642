"""Convert symbolic sizes of a capture to the stage format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from ravnest.split.capture import Capture, ModeCapture
from ravnest.split.graph import Dimension, SymbolRange
from ravnest.split.size_conditions import (
    AcceptedSizes,
    SizeCondition,
    accepted_sizes,
    provable_conditions,
)


class Dimensions:
    """Symbols of one captured graph, named ``b0``, ``b1``, ... in the order of its inputs."""

    def __init__(self, capture: ModeCapture) -> None:
        self._names: dict[sympy.Expr, str] = {}
        self._captured: dict[sympy.Expr, int] = {}
        self._capture = capture
        for node in capture.graph.nodes:
            if node.op == "placeholder" and node.name in capture.inputs:
                for size in node.meta["val"].shape:
                    if isinstance(size, torch.SymInt):
                        self._note(size)
        self._merged = self._related_batches()
        self._names |= {symbol: self._names[first] for symbol, first in self._merged.items()}

    def _related_batches(self) -> dict[sympy.Expr, sympy.Expr]:
        """Return the symbol that stands for each further one, if conditions relate batch sizes.

        Inputs may have symbols of their own for the batch. A condition on two of them holds if they are
        equal; stages require that then.
        """
        batches = self._capture.batch_symbols
        if not any(len(c.expression.free_symbols & batches) > 1 for c in self._capture.conditions):
            return {}
        first, *others = (symbol for symbol in self._names if symbol in batches)
        return dict.fromkeys(others, first)

    def _note(self, size: torch.SymInt) -> None:
        for symbol in sorted(size.node.expr.free_symbols, key=str):
            self._names.setdefault(symbol, f"b{len(self._names)}")
            factor, rest = size.node.expr.as_coeff_Mul()
            if rest == symbol and size.node.hint is not None:
                self._captured.setdefault(symbol, int(size.node.hint) // int(factor))
            elif symbol not in self._capture.batch_symbols:
                self._captured.setdefault(symbol, int(size.node.shape_env.size_hint(symbol)))

    @property
    def symbols(self) -> tuple[sympy.Expr, ...]:
        """Symbols in the order of ``ranges``."""
        return tuple(symbol for symbol in self._names if symbol not in self._merged)

    @property
    def varying(self) -> tuple[sympy.Expr, ...]:
        """Symbols of dimensions besides the batch."""
        return tuple(s for s in self._names if s not in self._capture.batch_symbols)

    def captured(self, symbol: sympy.Expr) -> int | None:
        """Return the size of a symbol in the example."""
        return self._captured.get(symbol)

    def place(self, symbol: sympy.Expr) -> tuple[int, int]:
        """Return the position of an input whose size has the symbol, and the dimension."""
        for node in self._capture.graph.nodes:
            if node.op == "placeholder" and node.name in self._capture.inputs:
                for dim, size in enumerate(node.meta["val"].shape):
                    if isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols:
                        return self._capture.inputs[node.name], dim
        raise AssertionError(f"no input has the size {symbol}")

    def of(self, shape: torch.Size) -> tuple[Dimension, ...]:
        """Return a shape in the stage format; sizes that are not multiples of a symbol become ``?``."""
        return tuple(self._dimension(size) for size in shape)

    def ranges(self) -> tuple[SymbolRange, ...]:
        """Return the sizes that each symbol may have."""
        return self._ranges

    @cached_property
    def _ranges(self) -> tuple[SymbolRange, ...]:
        return tuple(self._range(symbol, self._names[symbol]) for symbol in self.symbols)

    def accepted(self, symbol: sympy.Expr) -> AcceptedSizes:
        """Return the sizes for which conditions in forward have the outcome that was captured."""
        if symbol not in self._captured:
            return AcceptedSizes()
        open_, minimum = self._conditions
        sizes = accepted_sizes(open_, symbol, self._captured[symbol])
        if symbol in self._capture.batch_symbols or sizes.minimum >= minimum:
            return sizes
        return replace(sizes, minimum=minimum)

    @cached_property
    def _conditions(self) -> tuple[Sequence[SizeCondition], int]:
        """Conditions that may fail, and the least size of varying dimensions for which others hold."""
        limits = {
            symbol: None if symbol in self._capture.batch_symbols else self._captured[symbol]
            for symbol in self._names
            if symbol in self._captured
        }
        conditions = [
            replace(c, expression=c.expression.xreplace(self._merged)) for c in self._capture.conditions
        ]
        return provable_conditions([c for c in conditions if c.expression.free_symbols], limits)

    def _range(self, symbol: sympy.Expr, name: str) -> SymbolRange:
        """Return the range of a symbol. Capture assumes sizes of at least 2, but 1 works too."""
        lower, upper = self._bounds(symbol)
        sizes = self.accepted(symbol)
        least = 1 if lower <= 2 else lower
        largest = None if symbol in self._capture.batch_symbols else self._captured.get(symbol)
        most = [bound for bound in (upper, sizes.maximum, largest) if bound is not None]
        return SymbolRange(
            name=name,
            minimum=max(least, sizes.minimum),
            maximum=min(most, default=None),
            modulus=sizes.modulus,
            remainder=sizes.remainder,
            excluded=sizes.excluded,
            length=symbol not in self._capture.batch_symbols,
        )

    def _bounds(self, symbol: sympy.Expr) -> tuple[int, int | None]:
        """Return the least and the largest size that the tracer found, of all symbols of this size."""
        own = [symbol, *(other for other, first in self._merged.items() if first == symbol)]
        found = [self._capture.program.range_constraints.get(each) for each in own]
        lower = [_number(bounds.lower) or 1 for bounds in found if bounds is not None]
        upper = [size for b in found if b is not None and (size := _number(b.upper)) is not None]
        return max(lower, default=1), min(upper, default=None)

    def _dimension(self, size: int | torch.SymInt) -> Dimension:
        if isinstance(size, int):
            return Dimension(size)
        expression = size.node.expr
        if expression.is_Integer:
            return Dimension(int(expression))
        factor, rest = expression.as_coeff_Mul()
        if rest in self._names and factor.is_Integer:
            return Dimension(int(factor), self._names[rest])
        return Dimension(1, "?")


def varying_outputs(captured: Capture) -> dict[str, list[int]]:
    """Return the dimensions of the model's outputs whose sizes vary besides the batch, by path."""
    capture = captured.modes["train"]
    varying = set(Dimensions(capture).varying)
    output = next(node for node in capture.graph.nodes if node.op == "output")
    found: dict[str, list[int]] = {}
    for path, leaf in zip(capture.structure.leaf_paths("output"), output.args[0], strict=True):
        value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, torch.Tensor):
            sizes = [expression_of(size) for size in value.shape]
            dims = [
                k for k, size in enumerate(sizes) if size is not None and size.free_symbols & varying
            ]
            found |= {path: dims} if dims else {}
    return found


def expression_of(size: Any) -> Any:
    """Return the symbolic expression of a size; None for a plain number."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _number(bound: object) -> int | None:
    return int(bound) if isinstance(bound, sympy.Integer | int) else None
