"""State of the random generators that data loaders use, as plain values.

A loader draws from torch's generator, its own, Python's or NumPy's. Training continues with the same
batches if all of them are set to what they were when the interrupted epoch began.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ravnest.runtime.stage.randomness import generator_lock

RandomState = Mapping[str, Any]


def capture_random_state(loaders: Iterable[Any]) -> RandomState:
    """Return the state of the process's generators and of those of the loaders."""
    with generator_lock:
        version, numbers, gauss = random.getstate()
        return {
            "torch": _bytes(torch.default_generator),
            "python": (version, numbers, gauss),
            "numpy": _numpy_state(),
            "loaders": [_bytes(generator) for generator in _generators(loaders)],
        }


def restore_random_state(state: RandomState, loaders: Iterable[Any]) -> None:
    """Set the generators to a captured state; ``loaders`` are those of the capture, in its order."""
    with generator_lock:
        torch.default_generator.set_state(_tensor(state["torch"]))
        random.setstate(state["python"])
        name, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((name, np.frombuffer(keys, np.uint32), position, has_gauss, gauss))
        for generator, data in zip(_generators(loaders), state["loaders"], strict=False):
            generator.set_state(_tensor(data))


def _numpy_state() -> tuple[str, bytes, int, int, float]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return str(name), np.asarray(keys, np.uint32).tobytes(), int(position), int(has_gauss), float(gauss)


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Return the loaders' own generators, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        for owner in (loader, getattr(loader, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found.setdefault(id(generator), generator)
    return list(found.values())


def _bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
