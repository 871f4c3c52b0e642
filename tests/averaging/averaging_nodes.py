"""Nodes that form rings, over any transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from ravnest.averaging.allreduce import AllReduce, AllReduceResult, RingPart, TrimmedPart
from ravnest.transport.base import Link, Transport
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Hello, Message, RingChunk, RoundId

SECONDS = 20.0
"""Limit of all waits; tests that pass wait far less."""
PIECE_BYTES = 256
RINGS = {0: 1000, 1: 7, 2: 0}
"""Elements of each ring."""


@dataclass
class RingMember:
    """A node with an all-reduce, and links to its successor or to all others."""

    number: int
    allreduce: AllReduce
    successor: Link | None = None
    others: tuple[Link, ...] = ()
    ended: SimpleQueue[AllReduceResult] = field(default_factory=SimpleQueue)
    arrived: SimpleQueue[Message] = field(default_factory=SimpleQueue)

    def on_message(self, link: Link, message: Message) -> None:
        assert isinstance(message.head, RingChunk)
        self.allreduce.take(link, message)
        self.arrived.put(message)

    def on_lost(self, link: Link, reason: str) -> None:
        self.allreduce.lost(link, reason)

    def vectors(self) -> dict[int, Tensor]:
        generator = torch.Generator().manual_seed(self.number)
        return {ring: torch.randn(count, generator=generator) for ring, count in RINGS.items()}

    def start(self, round_id: RoundId, members: int, weight: float | None = None) -> None:
        parts = {
            ring: RingPart(
                vector,
                1 / members if weight is None else weight,
                self.number,
                members,
                (self.number - 1) % members,
                self.successor,
            )
            for ring, vector in self.vectors().items()
        }
        self.allreduce.start(round_id, parts, self.ended.put)

    def start_trimmed(
        self, round_id: RoundId, members: int, contributors: frozenset[int] | None = None
    ) -> None:
        """Start a round for the trimmed mean of all members, or of those that contribute."""
        counted = contributors or frozenset(range(members))
        positions = {number: number for number in range(members) if number != self.number}
        trimmed = TrimmedPart(counted, positions, self.others)
        parts = {
            ring: RingPart(vector, 1.0, self.number, members, 0, None, trimmed=trimmed)
            for ring, vector in self.vectors().items()
        }
        self.allreduce.start(round_id, parts, self.ended.put)

    def end(self) -> AllReduceResult:
        return self.ended.get(timeout=SECONDS)


def ring_of(count: int, transport: Callable[[], Transport]) -> list[RingMember]:
    """Return members that have each dialled the next one."""
    members, dial = _served(count, transport)
    for member in members:
        member.successor = dial(member, (member.number + 1) % count)
    return members


def mesh_of(count: int, transport: Callable[[], Transport]) -> list[RingMember]:
    """Return members that have each dialled all others."""
    members, dial = _served(count, transport)
    for member in members:
        member.others = tuple(dial(member, other) for other in range(count) if other != member.number)
    return members


def _served(
    count: int, transport: Callable[[], Transport]
) -> tuple[list[RingMember], Callable[[RingMember, int], Link]]:
    """Return members that can be dialled, and the function that dials one from another."""

    def hello(number: int) -> Hello:
        return Hello(PROTOCOL, "plan", number, number, 0)

    members = [RingMember(number, AllReduce(RINGS, piece_bytes=PIECE_BYTES)) for number in range(count)]
    transports = [transport() for _ in members]
    addresses = [
        each.serve(
            Address("127.0.0.1", 0), lambda peer, n=member.number: hello(n), member, lambda link: None
        )
        for member, each in zip(members, transports, strict=True)
    ]

    def dial(member: RingMember, target: int) -> Link:
        source = transports[member.number]
        return source.dial(addresses[target], hello(member.number), member, deadline=SECONDS)

    return members, dial
