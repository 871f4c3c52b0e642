"""How a node finds its neighbours in the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ravnest.errors import RunError, UnreachableError
from ravnest.store.node_spec import NeighbourSpec, NodeSpec
from ravnest.transport.base import Link, LinkHandler, Transport
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Hello, HelloRefused, Message

SHARED = ("averaging", "average_optim")
"""Settings that all clusters must agree on."""


class Others(LinkHandler, Protocol):
    """Whoever deals with nodes of other clusters."""

    def on_link(self, link: Link) -> None:
        """One has connected."""


@dataclass(frozen=True)
class _Router:
    """Hands what arrives to whom it is for."""

    cluster: int
    neighbours: LinkHandler
    others: LinkHandler

    def on_message(self, link: Link, message: Message) -> None:
        self._for(link).on_message(link, message)

    def on_lost(self, link: Link, reason: str) -> None:
        self._for(link).on_lost(link, reason)

    def _for(self, link: Link) -> LinkHandler:
        return self.neighbours if link.peer.cluster == self.cluster else self.others


@dataclass(frozen=True)
class Links:
    """The neighbours in the pipeline; None at its ends."""

    previous: Link | None = None
    next: Link | None = None


@dataclass(frozen=True)
class Rendezvous:
    """What it takes to meet: who we are, and how long to wait for whom."""

    place: NodeSpec
    hello: Hello
    listen: Address
    timeout: float
    say: Callable[[str], None]
    """Tells the user that the node waits."""

    def listen_and_dial(
        self, transport: Transport, handler: LinkHandler, others: Others | None = None
    ) -> Links:
        """Links to both neighbours, in whatever order they start; ``RunError`` names who is missing.

        ``others`` gets the links of nodes of other clusters, which may come at any time.
        """
        place = self.place
        if place.previous is None and place.next is None and others is None:
            return Links()
        arrived = threading.Event()
        found: list[Link] = []

        def on_link(link: Link) -> None:
            if others is not None and link.peer.cluster != place.cluster:
                others.on_link(link)
                return
            found.append(link)
            arrived.set()

        advertised = Address.parse(place.address)
        router = handler if others is None else _Router(place.cluster, handler, others)
        transport.serve(self.listen, self._admit, router, on_link, known_as=advertised)
        following = None if place.next is None else self._dial(place.next, transport, handler)
        if place.previous is not None:
            self._await(place.previous, arrived)
        return Links(found[0] if found else None, following)

    def _dial(self, following: NeighbourSpec, transport: Transport, handler: LinkHandler) -> Link:
        try:
            return transport.dial(
                Address.parse(following.address),
                self.hello,
                handler,
                deadline=self.timeout,
                waiting=lambda reason: self.say(f"{self._name} waits for {_named(following)}: {reason}"),
                expect=following.node,
            )
        except UnreachableError as error:
            raise UnreachableError(
                f"{self.place.name} cannot reach {_named(following)}: {error}; start it, or check that "
                "this machine can reach the address"
            ) from error

    @property
    def _name(self) -> str:
        return f"{self.place.name} ({self.place.role})"

    def _await(self, previous: NeighbourSpec, arrived: threading.Event) -> None:
        if not arrived.is_set():
            self.say(f"{self._name} waits for {_named(previous)} to connect")
        if not arrived.wait(self.timeout):
            raise RunError(
                f"{_named(previous)} has not connected to {self.place.name} at {self.listen} in "
                f"{self.timeout:.0f} s: start it, or check that it can reach this address"
            )

    def _admit(self, hello: Hello) -> Hello | HelloRefused:
        """Only the node before us, of the same plan and with the same settings."""
        own, previous = self.hello, self.place.previous
        if hello.protocol != PROTOCOL:
            return HelloRefused(
                f"it speaks protocol {hello.protocol}, {self.place.name} speaks {PROTOCOL}"
            )
        if hello.plan != own.plan:
            return HelloRefused(
                f"its node_data is of another clusterize() call (plan {hello.plan[:12]}, here "
                f"{own.plan[:12]}): copy the same node_data to all nodes"
            )
        if hello.cluster != own.cluster:
            return self._admit_other(hello)
        if previous is None or (hello.node, hello.cluster) != (previous.node, own.cluster):
            return HelloRefused(f"node_{hello.node} is not the node before {self.place.name}")
        return self._compare(hello, own.settings, "all nodes of a cluster need the same")

    def _admit_other(self, hello: Hello) -> Hello | HelloRefused:
        """Only those whom we average with: members of our rings, and Roots among themselves."""
        place = self.place
        lists = [*(ring.members for ring in place.rings), *([place.roots] if place.stage == 0 else [])]
        known = {(c, member.node) for members in lists for c, member in enumerate(members)}
        if (hello.cluster, hello.node) not in known:
            return HelloRefused(
                f"node_{hello.node} of cluster {hello.cluster} averages nothing with {place.name}"
            )
        return self._compare(hello, SHARED, "all clusters need the same")

    def _compare(self, hello: Hello, names: Iterable[str], rule: str) -> Hello | HelloRefused:
        for name in names:
            theirs, ours = hello.settings.get(name), self.hello.settings[name]
            if theirs != ours:
                return HelloRefused(
                    f"node_{hello.node} runs with {name}={theirs}, {self.place.name} "
                    f"with {name}={ours}: {rule}"
                )
        return self.hello


def _named(neighbour: NeighbourSpec) -> str:
    return f"node_{neighbour.node} at {neighbour.address}"
