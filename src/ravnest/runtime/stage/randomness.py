"""Reproducible random numbers for stages with dropout and similar operations.

Each micro-batch has its own seed at each stage, so that recomputation draws the same numbers. The CPU
generator is global to the process: a forward that draws and the iteration of the user's loaders exclude
each other, and the forward restores the state of the generator.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ravnest.split.graph import StageGraph
from ravnest.split.operators import resolve
from ravnest.types import MicrobatchId

generator_lock = threading.RLock()
"""Lock of the process-wide generator, shared by all nodes of the process."""


def microbatch_seed(seed: int, microbatch: MicrobatchId, stage: int) -> int:
    """Return the seed of a micro-batch at a stage."""
    name = struct.pack("<4Q", seed, microbatch.phase, microbatch.index, stage)
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def draws(graph: StageGraph) -> bool:
    """Return whether a graph may use random numbers."""
    targets = {operation.target for operation in graph.operations}
    return any(
        torch.Tag.nondeterministic_seeded in getattr(resolve(target), "tags", ()) for target in targets
    )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators inside the context and restore their state afterwards."""
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
