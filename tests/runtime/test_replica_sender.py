"""Replicas on real links in memory: training does not wait for more than a piece of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from ravnest.errors import LinkClosedError
from ravnest.runtime.control.replica_pacer import ReplicaPacer
from ravnest.runtime.control.replica_sender import ReplicaSender
from ravnest.runtime.control.state_blocks import (
    BLOCK,
    BlockReader,
    BlockWriter,
    ExpectedFile,
    data_bytes,
    part_of,
)
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.transport.base import Link
from ravnest.transport.memory import MemoryNetwork
from ravnest.types import Address, CheckpointId, MicrobatchId
from ravnest.wire.messages import PROTOCOL, Forward, Hello, Message, StateBlock

SECONDS = 60.0
"""Longest wait; successful ones are far shorter."""
RATE = 20e6
"""Bytes per second of the simulated link."""
SIZE = 3 * BLOCK // 4 + 5


@dataclass
class SlowPath:
    """Link of limited rate: bytes leave one after the other."""

    free_at: float = 0.0

    def passage(self, sender: int, _receiver: int, batch: bytes) -> Sequence[tuple[float, bytes]]:
        """Return what arrives later; only what node_0 sends is slow."""
        if sender != 0:
            return [(0.0, batch)]
        now = time.monotonic()
        self.free_at = max(self.free_at, now) + len(batch) / RATE
        return [(self.free_at - now, batch)]


@dataclass
class Receiver:
    """Peer that stores a replica and records the order in which messages arrive."""

    writer: BlockWriter
    arrived: list[int] = field(default_factory=list)
    """Bytes of each piece; 0 for a message of training."""
    stored: SimpleQueue[CheckpointManifest] = field(default_factory=SimpleQueue)
    trained: SimpleQueue[Message] = field(default_factory=SimpleQueue)

    def on_message(self, link: Link, message: Message) -> None:
        del link
        self.arrived.append(data_bytes(message))
        if not isinstance(message.head, StateBlock):
            self.trained.put(message)
            return
        manifest = self.writer.take(message)
        if manifest is not None:
            self.stored.put(manifest)

    def on_lost(self, link: Link, reason: str) -> None:
        del link, reason


class Ignoring:
    """Handler of the sender."""

    def on_message(self, link: Link, message: Message) -> None:
        del link, message

    def on_lost(self, link: Link, reason: str) -> None:
        del link, reason


@dataclass
class Case:
    """Link from node_0 to node_1, and a checkpoint of node_0."""

    network: MemoryNetwork
    link: Link
    receiver: Receiver
    reader: BlockReader
    target: CheckpointFolder
    manifest: CheckpointManifest
    hurry: threading.Event = field(default_factory=threading.Event)
    wanted: bool = True

    def sender(self) -> ReplicaSender:
        pacer = ReplicaPacer()
        pacer.begin(self.manifest.size, time.monotonic())
        return ReplicaSender(self.link, (), pacer, self.hurry, lambda: self.wanted)

    def send_all(self) -> bool:
        sender = self.sender()
        return all(sender.send(block) for block in self.reader.messages(restore=False))


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    source, target = CheckpointFolder(tmp_path / "source"), CheckpointFolder(tmp_path / "target")
    name = CheckpointId(1, 0)
    temporary = source.write_tensors(name, {"state/a": torch.rand(SIZE)})
    plain = CheckpointManifest("plan", "run", 1, 0, 1, 3, name, {}, {"x": [1, 2]}, attempt="a")
    manifest = source.finish(temporary, plain)
    source.add(temporary, manifest)
    network = MemoryNetwork(passage=SlowPath().passage)
    near, far = network.transport(), network.transport()
    receiver = Receiver(BlockWriter(target, ExpectedFile("plan", 0, 1, 3), lambda: None))
    address = far.serve(Address("a", 0), lambda _: hello(1), receiver, lambda _: None)
    link = near.dial(address, hello(0), Ignoring(), deadline=SECONDS)
    yield Case(network, link, receiver, BlockReader(source, manifest), target, manifest)
    near.close()
    far.close()


def hello(node: int) -> Hello:
    return Hello(PROTOCOL, "plan", node, 0, node, codec="raw")


def activation(number: int) -> Message:
    return Message(Forward("run", MicrobatchId(0, number), 1), {"x": torch.rand(25_000)})


class Training:
    """Thread that sends a message whenever the one before has arrived."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while not self._over.is_set():
            self._case.link.send(activation(number))
            self._case.receiver.trained.get(timeout=SECONDS)
            number += 1


def test_parts_of_a_block_are_the_block(case: Case, tmp_path: Path) -> None:
    target = CheckpointFolder(tmp_path / "other")
    writer = BlockWriter(target, ExpectedFile("plan", 0, 1, 3), lambda: None)
    found = None
    for block in case.reader.messages(restore=False):
        for start in range(0, data_bytes(block), 300_000):
            assert found is None
            found = writer.take(part_of(block, start, 300_000))
    assert found == case.manifest
    assert target.usable() == [case.manifest]


def test_a_replica_arrives_on_a_busy_link(case: Case) -> None:
    with Training(case):
        assert case.send_all()
        assert case.receiver.stored.get(timeout=SECONDS) == case.manifest
    assert case.target.usable() == [case.manifest]
    arrived = case.receiver.arrived
    assert arrived.count(0) > 1
    assert max(arrived) < BLOCK, "pieces are smaller than blocks"


def test_training_waits_for_one_piece_at_most(case: Case) -> None:
    case.network.block(0, 1)
    sent = threading.Event()
    queue = case.link.send

    def send(message: Message) -> None:
        queue(message)
        sent.set()

    case.link.send = send  # type: ignore[method-assign]
    sending = threading.Thread(target=case.send_all, daemon=True)
    sending.start()
    assert sent.wait(SECONDS)
    # Nothing arrives: after the first piece the link has only what training sends.
    for number in range(3):
        case.link.send(activation(number))
    case.network.unblock(0, 1)
    assert case.receiver.stored.get(timeout=SECONDS) == case.manifest
    sending.join(SECONDS)
    assert case.receiver.arrived[0] > 0
    assert case.receiver.arrived[1:4] == [0, 0, 0], "training comes before the second piece"


def test_a_resumed_link_delivers_the_rest(case: Case) -> None:
    sender = case.sender()
    blocks = case.reader.messages(restore=False)
    assert sender.send(next(blocks))
    case.network.cut(0, 1)
    assert all(sender.send(block) for block in blocks)
    assert case.receiver.stored.get(timeout=SECONDS) == case.manifest


def test_a_replica_in_a_hurry_waits_for_nobody(case: Case) -> None:
    case.hurry.set()
    with Training(case):
        assert case.send_all()
        assert case.receiver.stored.get(timeout=SECONDS) == case.manifest
    assert max(case.receiver.arrived) == BLOCK


def test_a_replica_that_is_not_wanted_any_more_ends(case: Case) -> None:
    case.wanted = False
    assert not case.send_all()
    assert case.receiver.stored.empty()


def test_a_lost_link_ends_the_replica(case: Case) -> None:
    sender = case.sender()
    blocks = case.reader.messages(restore=False)
    assert sender.send(next(blocks))
    case.link.close()
    with pytest.raises(LinkClosedError):
        sender.send(next(blocks))
