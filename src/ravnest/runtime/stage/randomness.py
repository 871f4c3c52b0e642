"""Random numbers that replay gives again.

Each micro-batch of each stage draws from a seed of its own. The CPU generator is global to the
process, so a forward that draws and the iteration of the user's loaders exclude each other, and the
forward leaves the generator as it found it.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ravnest.runtime.schedule.events import Batch
from ravnest.split.graph import StageGraph
from ravnest.split.operators import resolve

generator_lock = threading.RLock()
"""Held while the process's generator is used; one for all nodes of the process, like the generator."""


def batch_seed(seed: int, batch: Batch, stage: int) -> int:
    """The seed of a micro-batch at a stage."""
    name = struct.pack("<4Q", seed, batch.phase, batch.index, stage)
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def draws(graph: StageGraph) -> bool:
    """Whether a graph may use random numbers."""
    targets = {operation.target for operation in graph.operations}
    return any(
        torch.Tag.nondeterministic_seeded in getattr(resolve(target), "tags", ()) for target in targets
    )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from ``seed`` inside; outside, the generators go on as if nothing had happened."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    with generator_lock:
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
