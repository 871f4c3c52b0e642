"""Examples with smaller sizes in the dimensions that vary, for the self-check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import sympy
import torch

from ravnest.split.capture import Capture
from ravnest.split.dimensions import Dimensions
from ravnest.split.example import Example
from ravnest.split.graph import SymbolRange

_SMALL = (3, 1, 2)
"""Small sizes to compare besides about half of the largest: 1, and odd ones, often take other paths."""


def smaller_examples(capture: Capture, example: Example) -> Iterator[Example]:
    """Yield parts of the example with other sizes where they vary, the most telling first."""
    dimensions = Dimensions(capture.modes["train"])
    ranges = _ranges(capture, dimensions)
    if not ranges:
        return
    half = {symbol: _nearest(bounds, (bounds.maximum or 2) // 2) for symbol, bounds in ranges.items()}
    chosen: list[dict[sympy.Expr, int | None]] = [half]
    if len(ranges) > 1:
        chosen += [{symbol: size} for symbol, size in half.items()]
    chosen += [{symbol: _nearest(bounds, size) for symbol, bounds in ranges.items()} for size in _SMALL]
    seen: set[tuple[torch.Size, ...]] = {tuple(t.shape for t in example.tensors)}
    for assignment in chosen:
        found = _cropped(capture, example, dimensions, assignment)
        shapes = tuple(tensor.shape for tensor in found.tensors)
        if shapes not in seen:
            seen.add(shapes)
            yield found


def _ranges(capture: Capture, dimensions: Dimensions) -> dict[sympy.Expr, SymbolRange]:
    """Return the sizes of the symbols that vary. Both modes have inputs of the same sizes."""
    return {
        symbol: bounds
        for symbol, bounds in zip(dimensions.symbols, dimensions.ranges(), strict=True)
        if symbol in dimensions.varying and any(capture.example.varying)
    }


def _nearest(bounds: SymbolRange, size: int) -> int | None:
    """Return the accepted size nearest to ``size``; None if only the largest is accepted."""
    sizes = range(bounds.minimum, bounds.maximum or size + 1)
    return min((n for n in sizes if bounds.accepts(n)), key=lambda n: abs(n - size), default=None)


def _cropped(
    capture: Capture,
    example: Example,
    dimensions: Dimensions,
    sizes: Mapping[sympy.Expr, int | None],
) -> Example:
    """Return the example with the first elements of its dimensions, as many as ``sizes`` say."""
    mode = capture.modes["train"]
    values = {symbol: dimensions.captured(symbol) for symbol in dimensions.varying}
    values |= {symbol: size for symbol, size in sizes.items() if size is not None}
    tensors = list(example.tensors)
    for node in mode.graph.nodes:
        if node.op != "placeholder" or node.name not in mode.inputs:
            continue
        position = mode.inputs[node.name]
        for dim in example.varying[position]:
            size = node.meta["val"].shape[dim]
            wanted = size.node.expr.xreplace({k: sympy.Integer(v) for k, v in values.items()})
            tensors[position] = tensors[position].narrow(dim, 0, int(wanted))
    return replace(example, tensors=tuple(tensors))
