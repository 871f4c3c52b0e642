"""Arithmetic of stages on plain numbers, with bounds on what it takes and returns.

A graph computes sizes with Python's operators. Without bounds, a few operations of a hostile graph
could create an integer of gigabytes, or a text, and hold Python's global lock while they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MAX_INTEGER = 2**63
"""Bound of integers: sizes and arguments of operators have 64 bits."""
MAX_EXPONENT = 64
"""Largest exponent of a power of integers; a larger one exceeds 64 bits for every base but 0 and 1."""
MAX_DIGITS = 20
"""Most digits to which a number is rounded; 64 bits have 19."""
MAX_TERMS = 10_000
"""Most numbers in one sum."""

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class NumberError(ValueError):
    """A number, or the type of a value, is outside of what arithmetic on sizes takes."""


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` of a stage's arithmetic with checks; they raise ``NumberError``."""
    if name == "python::getitem":
        return _item
    check: Callable[..., None] = _CHECKS.get(name, _check_numbers)

    def call(*args: Any) -> Any:
        check(*args)
        result = function(*args)
        if isinstance(result, int) and not -MAX_INTEGER <= result < MAX_INTEGER:
            raise NumberError("the result has more than 64 bits")
        return result

    return call


def _item(container: Any, index: Any) -> Any:
    """Return an item of an operator's results; tensors have operators of their own for indexing."""
    if not isinstance(container, list | tuple) or not isinstance(index, int):
        raise NumberError(
            f"it takes an item of a list by its number, got {_kind(container)} and {_kind(index)}"
        )
    return container[index]


def _check_numbers(*args: Any) -> None:
    for value in args:
        if not isinstance(value, _NUMBERS):
            raise NumberError(f"it computes with numbers, got {_kind(value)}")


def _check_power(base: Any, exponent: Any) -> None:
    _check_numbers(base, exponent)
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and exponent > MAX_EXPONENT and abs(base) > 1:
        raise NumberError(f"the exponent {exponent} is larger than {MAX_EXPONENT}")


def _check_rounding(number: Any, digits: Any = None) -> None:
    _check_numbers(number)
    if digits is not None and not (isinstance(digits, int) and abs(digits) <= MAX_DIGITS):
        raise NumberError(f"it rounds to at most {MAX_DIGITS} digits")


def _check_sum(terms: Any) -> None:
    if not isinstance(terms, list | tuple) or len(terms) > MAX_TERMS:
        raise NumberError(f"it adds a list of at most {MAX_TERMS} numbers")
    _check_numbers(*terms)


_CHECKS: dict[str, Callable[..., None]] = {
    "python::pow": _check_power,
    "python::round": _check_rounding,
    "size::sym_sum": _check_sum,
}


def _kind(value: Any) -> str:
    return type(value).__name__
