"""Random numbers from generators that stages do not have: Python's ``random`` and ``numpy.random``."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import numpy as np

from ravnest.errors import CaptureError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class OutsideDrawError(CaptureError):
    """Numbers were drawn from these generators, by forward or by another thread."""


def tried_again(compute: Callable[P, T]) -> Callable[P, T]:
    """Compute once more if numbers were drawn: forward draws again, another thread hardly ever."""

    @functools.wraps(compute)
    def twice(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return compute(*args, **kwargs)
        except OutsideDrawError as error:
            logger.info("tried once more, in case another thread has drawn them: %s", error)
            return compute(*args, **kwargs)

    return twice


@contextlib.contextmanager
def refuse_outside_randomness() -> Iterator[None]:
    """Raise ``OutsideDrawError`` if the body draws from these generators; put their states back.

    A number that is drawn while a model is captured would become a constant of the stages.
    """
    python, numpy, words = random.getstate(), np.random.get_state(legacy=False), _words()
    drawn = ""
    try:
        yield
        if random.getstate() != python:
            drawn = "Python's random module"
        elif _words() != words:
            drawn = "numpy.random"
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    if drawn:
        raise OutsideDrawError(
            f"forward draws random numbers from {drawn}: stages cannot, and would repeat one draw for "
            "ever. Draw from torch's default generator (torch.rand, dropout) and choose with "
            "torch.where or by a product with the draw; or switch off what draws (layer dropping)"
        )


def _words() -> tuple[bytes, str]:
    """Return the state of numpy's global generator as a value that can be compared."""
    state = dict(np.random.get_state(legacy=False))
    inner = dict(state.pop("state"))
    return np.asarray(inner.pop("key", ())).tobytes(), repr((state, inner))
