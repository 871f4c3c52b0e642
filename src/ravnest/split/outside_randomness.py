"""Random numbers from generators that stages do not have: Python's ``random`` and ``numpy.random``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from ravnest.errors import CaptureError


@contextlib.contextmanager
def refuse_outside_randomness() -> Iterator[None]:
    """Raise ``CaptureError`` if the body draws from these generators; put their states back in any case.

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
        raise CaptureError(
            f"forward draws random numbers from {drawn}: stages cannot, and would repeat one draw for "
            "ever. Draw from torch's default generator (torch.rand, dropout) and choose with "
            "torch.where or by a product with the draw; or switch off what draws (layer dropping)"
        )


def _words() -> tuple[bytes, str]:
    """Return the state of numpy's global generator as a value that can be compared."""
    state = dict(np.random.get_state(legacy=False))
    inner = dict(state.pop("state"))
    return np.asarray(inner.pop("key", ())).tobytes(), repr((state, inner))
