"""Virtual time, and the nodes that live in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from virtual_disk import VirtualDisk


class VirtualClock:
    """Virtual time, and calls in the future."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call at a time; calls of the same time in the order in which they were requested."""
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, call, arguments))

    def soon(self, most: float) -> float:
        """Return a time within ``most`` seconds."""
        return self.now + self.random.random() * most

    def step(self) -> bool:
        """Make the next call; return False if there is none."""
        if not self._heap:
            return False
        self.now, _, call, arguments = heapq.heappop(self._heap)
        call(*arguments)
        return True


@dataclass
class VirtualNode:
    """A place in the pipeline and the machine that has it."""

    stage: int
    disk: VirtualDisk = field(default_factory=VirtualDisk)
    earlier: list[VirtualDisk] = field(default_factory=list)
    """Disks of machines that had the place before."""
    process: int = 0
    """Number of the process; each start has a new one."""
    up: bool = True
    wanted: str = ""
    """Run that the process has left because of a loss."""
    stopped_until: float = 0.0
    full_until: float = 0.0
    slow_until: float = 0.0
    busy_until: float = 0.0
    """Time until which the node's checkpoint thread is busy."""
