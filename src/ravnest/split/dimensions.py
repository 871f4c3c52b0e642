"""Convert symbolic sizes of a capture to the stage format."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from ravnest.split.capture import ModeCapture
from ravnest.split.graph import Dimension, SymbolRange


class Dimensions:
    """Symbols of one captured graph, named ``b0``, ``b1``, ... in the order of its inputs."""

    def __init__(self, capture: ModeCapture) -> None:
        self._names: dict[sympy.Expr, str] = {}
        for node in capture.graph.nodes:
            if node.op == "placeholder" and node.name in capture.inputs:
                for size in node.meta["val"].shape:
                    if isinstance(size, torch.SymInt):
                        for symbol in sorted(size.node.expr.free_symbols, key=str):
                            self._names.setdefault(symbol, f"b{len(self._names)}")
        self._ranges = capture.program.range_constraints

    def of(self, shape: torch.Size) -> tuple[Dimension, ...]:
        """Return a shape in the stage format; sizes that are not multiples of a symbol become ``?``."""
        return tuple(self._dimension(size) for size in shape)

    def ranges(self) -> tuple[SymbolRange, ...]:
        """Return the bounds of each symbol. Capture assumes sizes of at least 2, but 1 works too."""
        result = []
        for symbol, name in self._names.items():
            bounds = self._ranges.get(symbol)
            lower, upper = (
                (1, None) if bounds is None else (_number(bounds.lower), _number(bounds.upper))
            )
            result.append(SymbolRange(name, 1 if lower is None or lower <= 2 else lower, upper))
        return tuple(result)

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


def expression_of(size: Any) -> Any:
    """Return the symbolic expression of a size; None for a plain number."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _number(bound: object) -> int | None:
    return int(bound) if isinstance(bound, sympy.Integer | int) else None
