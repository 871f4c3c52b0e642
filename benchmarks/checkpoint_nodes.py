"""Processes of pipelines with and without checkpoints: they train on request and count what is stored.

    python checkpoint_nodes.py '<settings as JSON>'

The Root reads the seconds to train for and answers with a ``Stored``, as in `contenders.py`. Each node
writes what it has counted to ``stored_<team>_<node>.json`` when it ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from contenders import Racing, Rate, Seat, ravnest

from ravnest.runtime.control.checkpoint_slowdown import CheckpointSlowdown
from ravnest.runtime.control.checkpoints import Checkpoints
from ravnest.runtime.control.state_blocks import BYTES, BlockReader
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.telemetry import CheckpointRecord
from ravnest.wire.messages import Message

FROZEN = "frozen"
"""Team whose optimizer has only half of the parameters."""


@dataclass(frozen=True)
class Stored(Rate):
    """Measurements of a Root."""

    checkpoints: int = 0
    """Checkpoints that the Root has finished while it trained."""


@dataclass
class Counted:
    """Checkpoints of a node."""

    pauses: list[float] = field(default_factory=list)
    """Seconds for which the stage stopped, for each checkpoint."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each checkpoint."""
    sent: list[int] = field(default_factory=list)
    """Bytes that were sent for each replica."""
    seconds: list[float] = field(default_factory=list)
    """Seconds in which each replica was sent."""
    delayed: list[float] = field(default_factory=list)
    """Seconds for which training waited for each replica, as the node estimates them."""
    updates: list[tuple[float, bool]] = field(default_factory=list)
    """Time of each update at the Root, and whether a checkpoint was being stored before it."""

    def emit(self, record: Any) -> None:
        """Count a checkpoint."""
        if isinstance(record, CheckpointRecord):
            self.pauses.append(record.seconds)
            self.sizes.append(record.bytes)


COUNTED = Counted()


class _CountingRacing(Racing):
    def _run(self, seconds: float) -> Rate:
        before = len(COUNTED.pauses)
        rate = super()._run(seconds)
        return Stored(**asdict(rate), checkpoints=len(COUNTED.pauses) - before)


def _count_blocks() -> None:
    """Count the bytes of replicas; a training process sends no other blocks."""
    messages = BlockReader.messages

    def counted(self: BlockReader, *, restore: bool) -> Iterator[Message]:
        COUNTED.sent.append(0)
        for message in messages(self, restore=restore):
            value = message.values.get(BYTES)
            COUNTED.sent[-1] += value.nbytes if isinstance(value, torch.Tensor) else 0
            yield message

    BlockReader.messages = counted  # type: ignore[method-assign]


def _time_replicas() -> None:
    replicate = Checkpoints._replicate

    def timed(self: Checkpoints, folder: CheckpointFolder, manifest: CheckpointManifest) -> None:
        began = time.monotonic()
        replicate(self, folder, manifest)
        COUNTED.seconds.append(time.monotonic() - began)
        COUNTED.delayed.append(self._pacer.delayed)

    Checkpoints._replicate = timed  # type: ignore[method-assign]


def _time_updates() -> None:
    update = CheckpointSlowdown.update

    def timed(self: CheckpointSlowdown, now: float, *, storing: bool) -> None:
        COUNTED.updates.append((now, storing))
        update(self, now, storing=storing)

    CheckpointSlowdown.update = timed  # type: ignore[method-assign]


def _half(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[dict[str, Any]]:
    """Return a parameter group with the first half of a stage's parameters."""
    parameters = [parameter for _, parameter in named]
    return [{"params": parameters[: len(parameters) // 2], "lr": 1e-4}]


def main(seat: Seat) -> None:
    """Run one node."""
    torch.set_num_threads(1)
    _count_blocks()
    _time_replicas()
    _time_updates()
    settings: dict[str, Any] = {"optimizer_params": _half} if seat.team == FROZEN else {}
    ravnest(seat, _CountingRacing, record_sink=COUNTED, **settings)
    path = Path(seat.folder) / f"stored_{seat.team}_{seat.name}.json"
    path.write_text(json.dumps(asdict(COUNTED)), encoding="utf-8")


if __name__ == "__main__":
    main(Seat(**json.loads(sys.argv[1])))
