"""Dimensions of inputs, besides the batch, whose sizes vary between batches.

The example inputs have the largest sizes. The dimensions are captured as symbols; where forward uses
one of them as a plain number, the capture is refused with the line that does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ravnest.errors import CaptureError, SplitError
from ravnest.split.source import line_of_stack

Varying = Mapping[str, int | Sequence[int]]
"""Dimensions whose sizes vary, by the name of the input."""
FixedLines = dict[tuple[int, int], str]
"""Lines that fix sizes, by the position of the input's tensor and the dimension."""

PADDING_ADVICE = "pad all samples to one length (padding='max_length' of a tokenizer), or crop them"


def find_varying(
    varying: Varying, paths: Sequence[str], tensors: Sequence[torch.Tensor], batch_dim: int
) -> tuple[frozenset[int], ...]:
    """Return the dimensions of each tensor that vary; raise ``SplitError`` for others than it has."""
    if not isinstance(varying, Mapping):
        raise SplitError(
            "varying must map names of inputs to dimensions, such as {'input_ids': [1]}; got "
            f"{varying!r}"
        )
    for name in varying:
        if name not in paths:
            close = difflib.get_close_matches(str(name), paths, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise SplitError(
                f"varying names {name!r}, which is not one of the inputs {', '.join(paths)}{hint}"
            )
    pairs = zip(paths, tensors, strict=True)
    return tuple(_dimensions(varying.get(path, ()), path, t, batch_dim) for path, t in pairs)


def _dimensions(
    given: int | Sequence[int], path: str, tensor: torch.Tensor, batch_dim: int
) -> frozenset[int]:
    dims = [given] if isinstance(given, int) else list(given)
    found = set()
    for dim in dims:
        if not isinstance(dim, int) or isinstance(dim, bool) or not -tensor.dim() <= dim < tensor.dim():
            raise SplitError(
                f"varying={{{path!r}: ...}} has {dim!r}, which is not a dimension of {path}: it has "
                f"{tensor.dim()}, counted from 0"
            )
        place = dim % tensor.dim()
        if place != batch_dim and tensor.shape[place] < 2:
            raise SplitError(
                f"dimension {place} of {path} is to vary, but has {tensor.shape[place]} elements in the "
                "example inputs: give an example with the largest size"
            )
        found.add(place)
    return frozenset(found - {batch_dim})


@contextmanager
def noted_fixed_sizes() -> Iterator[FixedLines]:
    """Yield a table of the lines that fix a size of an input while the body captures a model."""
    found: FixedLines = {}
    original = ShapeEnv._set_replacement

    def note(environment: Any, symbol: sympy.Symbol, target: sympy.Expr, reason: str) -> None:
        if target.is_Integer:
            for source in environment.var_to_sources.get(symbol, ()):
                place = (
                    getattr(getattr(source, "base", None), "index", None),
                    getattr(source, "idx", None),
                )
                if isinstance(place[0], int) and isinstance(place[1], int):
                    found.setdefault((place[0], place[1]), line_of_stack())
        original(environment, symbol, target, reason)

    ShapeEnv._set_replacement = note  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        ShapeEnv._set_replacement = original  # type: ignore[method-assign]


def refuse_fixed(path: str, dim: int, size: int, line: str) -> CaptureError:
    """Return the error of a dimension that is to vary and that forward uses as a plain number."""
    where = f"{line}\nthis line uses" if line else "forward uses"
    return CaptureError(
        f"{where} the size of dimension {dim} of {path} ({size} in the example) as a plain number, so "
        "that it cannot vary between batches. Write it without the number (x.shape[1] instead of "
        "int(x.shape[1]), -1 instead of a constant in view, no loop over the positions); if another "
        f"input has the same size there, name it in varying too; or {PADDING_ADVICE}"
    )


def refuse_condition(path: str, dim: int, lines: Sequence[str]) -> CaptureError:
    """Return the error of a dimension that is to vary and whose size decides what forward does."""
    where = "".join(f"{line}\n" for line in lines)
    return CaptureError(
        f"{where}forward decides by the size of dimension {dim} of {path}, and stages have the "
        "branch of the example only, so that the size cannot vary between batches. "
        f"Write forward without the condition, or {PADDING_ADVICE}"
    )
