"""Conditions on sizes that forward evaluates: the captured graph has one of the branches only.

``if x.size(0) % 2 == 0`` is decided once, while the model is captured. The conditions are noted, and
stages refuse batches for which they have another outcome.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import sympy
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ravnest.split.source import is_user_code, line_of_stack

_TORCH = Path(torch.__file__).parent
_DENSE = 512
"""Sizes up to this one are all tried."""
_LARGEST = 2**24
_MAX_EXCLUDED = 8
"""Sizes that are excluded one by one; more become a bound or a remainder."""


@dataclass(frozen=True)
class SizeCondition:
    """A condition on sizes that is true in the captured program."""

    expression: sympy.Basic
    line: str
    """Line of the user's code that evaluates it; empty if it is one of torch."""


@dataclass(frozen=True)
class AcceptedSizes:
    """Sizes for which all conditions have the outcome that was captured."""

    minimum: int = 1
    maximum: int | None = None
    modulus: int = 1
    remainder: int = 0
    excluded: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    """Lines of the conditions that exclude a size."""


@contextmanager
def noted_conditions() -> Iterator[list[SizeCondition]]:
    """Yield the list that conditions on symbolic sizes are added to while the body evaluates them.

    Conditions of torch's tracer and kernels do not count: they choose how to compute, not what.
    """
    found: dict[tuple[sympy.Basic, str], SizeCondition] = {}
    noted: list[SizeCondition] = []
    original = torch.SymBool.__bool__

    def note(condition: torch.SymBool) -> bool:
        expression = condition.node.expr
        outcome = bool(original(condition))  # type: ignore[no-untyped-call]
        filename = sys._getframe(1).f_code.co_filename
        if _is_model_code(filename):
            held = expression if outcome else sympy.Not(expression)
            if isinstance(held, sympy.Basic) and held.free_symbols:
                line = line_of_stack() if is_user_code(filename) else ""
                entry = SizeCondition(held, line)
                if found.setdefault((held, line), entry) is entry:
                    noted.append(entry)
        return outcome

    torch.SymBool.__bool__ = note  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        torch.SymBool.__bool__ = original  # type: ignore[method-assign]


def _is_model_code(filename: str) -> bool:
    """Return True for code of the user, and for layers and functions of torch that are traced."""
    if is_user_code(filename):
        return True
    path = Path(filename)
    if not path.is_relative_to(_TORCH):
        return False
    first = path.relative_to(_TORCH).parts[0]
    return first in ("nn", "functional.py", "distributions")


def provable_conditions(
    conditions: Sequence[SizeCondition], limits: Mapping[sympy.Symbol, int | None]
) -> tuple[list[SizeCondition], int]:
    """Leave out conditions on several sizes that hold for all sizes up to ``limits``.

    A batch of several samples and positions has more than one element, for example. Sizes with a limit
    are at least 1, or more where a condition needs that: returns what is left and this minimum.
    """
    found: list[SizeCondition] = []
    minimum = 1
    most = min((limit for limit in limits.values() if limit is not None), default=1)
    for condition in conditions:
        symbols = condition.expression.free_symbols
        provable = len(symbols) > 1 and symbols <= limits.keys()
        if not provable or not _always_holds(condition.expression, limits, most):
            found.append(condition)
        else:
            holds = partial(_always_holds, condition.expression, limits)
            minimum = max(minimum, 1 + bisect_left(range(1, most), True, key=holds))
    return found, minimum


def _always_holds(
    expression: sympy.Basic, limits: Mapping[sympy.Symbol, int | None], least: int
) -> bool:
    ranges = {
        symbol: ValueRanges(1, int_oo) if limit is None else ValueRanges(least, limit)
        for symbol, limit in limits.items()
    }
    return bool(bound_sympy(expression, ranges).lower)


def accepted_sizes(
    conditions: Iterable[SizeCondition], symbol: sympy.Symbol, captured: int
) -> AcceptedSizes:
    """Return the sizes for which conditions on ``symbol`` hold, around the size that was captured."""
    relevant = [c for c in conditions if symbol in c.expression.free_symbols]
    if any(c.expression.free_symbols != {symbol} for c in relevant):
        return AcceptedSizes(captured, captured, lines=_lines(relevant))
    points = _points(relevant, captured)
    failing = {c: [n for n in points if not _holds(c.expression, symbol, n)] for c in relevant}
    restricting = [c for c, sizes in failing.items() if sizes]
    bad = sorted({n for sizes in failing.values() for n in sizes})
    modulus = math.lcm(*(d for c in restricting for d in _divisors(c.expression)))
    if modulus > 1 and len(bad) > _MAX_EXCLUDED:
        points = [n for n in points if n % modulus == captured % modulus]
        bad = [n for n in bad if n % modulus == captured % modulus]
    else:
        modulus = 1
    below, above = [n for n in bad if n < captured], [n for n in bad if n > captured]
    minimum = next(n for n in points if n not in set(below))
    below = [n for n in below if n > minimum]
    if len(below) > _MAX_EXCLUDED:
        minimum, below = min(n for n in points if n > max(below)), []
    maximum = None
    if len(above) > _MAX_EXCLUDED or (above and above[-1] > _DENSE):
        maximum, above = max(n for n in points if n < above[0]), []
    return AcceptedSizes(
        minimum, maximum, modulus, captured % modulus, (*below, *above), _lines(restricting)
    )


def _lines(conditions: Sequence[SizeCondition]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(c.line for c in conditions if c.line))


def _holds(expression: sympy.Basic, symbol: sympy.Symbol, size: int) -> bool:
    return bool(expression.xreplace({symbol: sympy.Integer(size)}) == sympy.true)


def _divisors(expression: sympy.Basic) -> Iterator[int]:
    """Yield the numbers that a condition divides by."""
    for part in sympy.preorder_traversal(expression):
        if type(part).__name__ in ("Mod", "PythonMod", "FloorDiv", "CleanDiv") and len(part.args) == 2:
            divisor = part.args[1]
            if isinstance(divisor, sympy.Integer) and int(divisor) > 0:
                yield int(divisor)


def _points(conditions: Iterable[SizeCondition], captured: int) -> list[int]:
    """Return the sizes to try: small ones, powers of 2, and those near numbers in the conditions."""
    found = {*range(1, _DENSE + 1), captured, *(2**power for power in range(10, 25))}
    for condition in conditions:
        numbers = {abs(int(n)) for n in condition.expression.atoms(sympy.Integer)} - {0}
        for number in numbers:
            for factor in numbers | {1}:
                found.update(number // factor + offset for offset in range(-2, 3))
                found.update(number * factor + offset for offset in range(-2, 3))
    return sorted(n for n in found if 1 <= n <= _LARGEST)
