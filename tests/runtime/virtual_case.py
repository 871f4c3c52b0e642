"""Trainings with faults under virtual time, as plain values that follow from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from fault_plan import FaultKind

from ravnest.types import Schedule

OUTAGE = 8.0
"""Seconds after which a node that does not answer counts as lost."""


@dataclass(frozen=True)
class VirtualFault:
    """Something that happens to a node at a time."""

    at: float
    kind: FaultKind
    node: int
    seconds: float
    """Until the node is started again, continues, has a fast link or free space."""
    disk: Literal["kept", "lost", "old"] = "kept"
    """After a kill: the same machine returns, or one without checkpoints takes its place, or the one
    that was there before the last machine."""

    def __str__(self) -> str:
        disk = f", disk {self.disk}" if self.kind is FaultKind.KILL else ""
        return f"{self.at:7.2f} s: {self.kind} node_{self.node} for {self.seconds:.2f} s{disk}"


@dataclass(frozen=True)
class VirtualCase:
    """A pipeline, its training, and what goes wrong."""

    seed: int
    stages: int
    schedule: Schedule
    update_frequency: int
    phases: tuple[tuple[bool, int], ...]
    """For each phase: whether it trains, and its batches."""
    parts: tuple[int, ...]
    """Numbers of micro-batches of a batch; each attempt has its own sequence of them."""
    window: int
    clip: bool
    defers: bool
    speeds: tuple[float, ...]
    """Seconds of a forward, by stage; a backward takes as long."""
    delay: float
    """Mean delay of a link."""
    checkpoint_updates: int | None
    checkpoint_seconds: float
    pause: float
    """Seconds for which a checkpoint stops a stage."""
    writing: tuple[float, ...]
    """Seconds until a checkpoint is on the disk, by stage; half of it again for the replica."""
    resumes: bool
    """Nodes that are started again continue the newest run, also if all were lost."""
    faults: tuple[VirtualFault, ...]

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.stages} stages, {self.schedule}, phases {self.phases}, "
            f"update_frequency={self.update_frequency}, parts {self.parts}, window {self.window}, "
            f"clip={self.clip}, defers={self.defers}, resumes={self.resumes}",
            f"  checkpoints every {self.checkpoint_updates} updates or {self.checkpoint_seconds:.1f} s, "
            f"pause {self.pause:.3f} s, writing {[round(each, 2) for each in self.writing]} s",
        ]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])


def case_of(seed: int) -> VirtualCase:
    """Return the case of a seed."""
    random = Random(seed)
    stages = random.randint(1, 5)
    phases: list[tuple[bool, int]] = []
    validates = random.random() < 0.6
    for _ in range(random.randint(2, 4)):
        phases.append((True, random.randint(2, 8)))
        if validates:
            phases.append((False, random.randint(1, 3)))
    speeds = tuple(random.uniform(0.2, 1.0) for _ in range(stages))
    delay = random.choice((0.0, 0.05, 0.3))
    # A run without faults takes about this long.
    batch = 2 * (sum(speeds) + stages * delay)
    length = sum(batches for _, batches in phases) * batch * 0.7 + 5.0
    return VirtualCase(
        seed,
        stages,
        random.choice(("sync", "async")),
        random.choice((1, 3)),
        tuple(phases),
        random.choice(((1,), (2,), (1, 3, 2))),
        random.randint(1, 5),
        random.random() < 0.2,
        random.random() < 0.5,
        speeds,
        delay,
        random.choice((None, 1, 2, 3)),
        random.uniform(2.0, 20.0),
        random.choice((0.0, 0.01, 0.05)),
        tuple(random.choice((0.05, 0.3, 1.0, 6.0)) for _ in range(stages)),
        random.random() < 0.9,
        _faults(random, stages, length),
    )


def _faults(random: Random, stages: int, length: float) -> tuple[VirtualFault, ...]:
    found: list[VirtualFault] = []
    for _ in range(random.randint(0, 5)):
        at, kind = random.uniform(0.25, 1.3) * length, random.random()
        nodes = random.sample(range(stages), min(stages, random.choice((1, 1, 1, 1, 2, 5))))
        if kind < 0.6:
            for node in nodes:
                found.append(_kill(random, node, at))
                if random.random() < 0.25:  # during the recovery, or soon after it
                    again = random.randrange(stages)
                    found.append(_kill(random, again, at + random.uniform(0.0, 12.0)))
                if found[-1].disk == "lost" and random.random() < 0.5:  # the machine returns
                    later = at + random.uniform(2.0, 30.0)
                    found.append(VirtualFault(later, FaultKind.KILL, found[-1].node, 2.0, "old"))
        elif kind < 0.75:
            seconds = random.uniform(0.5, 3 * OUTAGE)
            found.append(VirtualFault(at, FaultKind.STOP, nodes[0], seconds))
        elif kind < 0.85:
            found.append(VirtualFault(at, FaultKind.DELAY, nodes[0], random.uniform(1.0, 20.0)))
        else:
            found.append(VirtualFault(at, FaultKind.FULL_DISK, nodes[0], random.uniform(1.0, length)))
    return tuple(sorted(found, key=lambda fault: fault.at))


def _kill(random: Random, node: int, at: float) -> VirtualFault:
    disk: Literal["kept", "lost"] = "lost" if random.random() < 0.3 else "kept"
    return VirtualFault(at, FaultKind.KILL, node, random.uniform(0.5, 6.0), disk)
