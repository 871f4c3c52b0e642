"""Nodes that form rings, over any transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from ravnest.averaging.allreduce import AllReduce, AllReduceResult, RingPart
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
    """A node with an all-reduce and a link to its successor."""

    number: int
    allreduce: AllReduce
    successor: Link | None = None
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

    def end(self) -> AllReduceResult:
        return self.ended.get(timeout=SECONDS)


def ring_of(count: int, transport: Callable[[], Transport]) -> list[RingMember]:
    """Return members that have each dialled the next one."""

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
    for member, each in zip(members, transports, strict=True):
        target = (member.number + 1) % count
        member.successor = each.dial(addresses[target], hello(member.number), member, deadline=SECONDS)
    return members
