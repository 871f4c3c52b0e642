"""Rendezvous of a node with its neighbours in the pipeline."""

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

SHARED_SETTINGS = ("averaging", "average_optim")
"""Settings that must be the same in all clusters."""


class ClusterLinkHandler(LinkHandler, Protocol):
    """Handler of links to nodes of other clusters."""

    def on_link(self, link: Link) -> None:
        """Take the link of a node of another cluster that has connected."""


@dataclass(frozen=True)
class _Router:
    """Dispatcher of messages: from this cluster to one handler, from other clusters to another."""

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
    """Links to the neighbours in the pipeline; None at its ends."""

    previous: Link | None = None
    next: Link | None = None


@dataclass(frozen=True)
class Rendezvous:
    """Connection of a node to its neighbours at the start of a run."""

    spec: NodeSpec
    hello: Hello
    listen: Address
    timeout: float
    say: Callable[[str], None]
    """Prints a line for the user."""

    def listen_and_dial(
        self, transport: Transport, handler: LinkHandler, others: ClusterLinkHandler | None = None
    ) -> Links:
        """Connect to both neighbours and return the links; they may start in any order.

        ``RunError`` names the neighbour that is missing. ``others`` receives the links of nodes of other
        clusters, which may connect at any time.
        """
        spec = self.spec
        if spec.previous is None and spec.next is None and others is None:
            return Links()
        arrived = threading.Event()
        found: list[Link] = []

        def on_link(link: Link) -> None:
            if others is not None and link.peer.cluster != spec.cluster:
                others.on_link(link)
                return
            found.append(link)
            arrived.set()

        advertised = Address.parse(spec.address)
        router = handler if others is None else _Router(spec.cluster, handler, others)
        transport.serve(self.listen, self._admit, router, on_link, known_as=advertised)
        following = None if spec.next is None else self._dial(spec.next, transport, handler)
        if spec.previous is not None:
            self._await(spec.previous, arrived)
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
                others=following.further,
            )
        except UnreachableError as error:
            raise UnreachableError(
                f"{self.spec.name} cannot reach {_named(following)}: {error}; start it, or check that "
                "this machine can reach the address"
            ) from error

    @property
    def _name(self) -> str:
        return f"{self.spec.name} ({self.spec.role})"

    def _await(self, previous: NeighbourSpec, arrived: threading.Event) -> None:
        if not arrived.is_set():
            self.say(f"{self._name} waits for {_named(previous)} to connect")
        if not arrived.wait(self.timeout):
            raise RunError(
                f"{_named(previous)} has not connected to {self.spec.name} at {self.listen} in "
                f"{self.timeout:.0f} s: start it, or check that it can reach this address"
            )

    def _admit(self, hello: Hello) -> Hello | HelloRefused:
        """Accept only the previous node, with the same plan and the same settings."""
        own, previous = self.hello, self.spec.previous
        if hello.protocol != PROTOCOL:
            return HelloRefused(
                f"it uses protocol {hello.protocol}, {self.spec.name} uses {PROTOCOL}: install the same "
                "version of ravnest on all nodes"
            )
        if hello.plan != own.plan:
            return HelloRefused(
                f"its node_data comes from another clusterize() call (plan {hello.plan[:12]}, here "
                f"{own.plan[:12]}): copy the same node_data to all nodes"
            )
        if hello.cluster != own.cluster:
            return self._admit_other(hello)
        if previous is None or (hello.node, hello.cluster) != (previous.node, own.cluster):
            return HelloRefused(f"node_{hello.node} is not the previous node of {self.spec.name}")
        return self._compare(hello, own.settings, "all nodes of a cluster need the same")

    def _admit_other(self, hello: Hello) -> Hello | HelloRefused:
        """Accept only members of this node's rings and, at a Root, other Roots."""
        spec = self.spec
        lists = [*(ring.members for ring in spec.rings), *([spec.roots] if spec.stage == 0 else [])]
        known = {(c, member.node) for members in lists for c, member in enumerate(members)}
        if (hello.cluster, hello.node) not in known:
            return HelloRefused(
                f"node_{hello.node} of cluster {hello.cluster} shares no ring with {spec.name}"
            )
        return self._compare(hello, SHARED_SETTINGS, "all clusters need the same")

    def _compare(self, hello: Hello, names: Iterable[str], rule: str) -> Hello | HelloRefused:
        for name in names:
            theirs, ours = hello.settings.get(name), self.hello.settings[name]
            if theirs != ours:
                return HelloRefused(
                    f"node_{hello.node} runs with {name}={theirs}, {self.spec.name} "
                    f"with {name}={ours}: {rule}"
                )
        return self.hello


def _named(neighbour: NeighbourSpec) -> str:
    return f"node_{neighbour.node} at {neighbour.address}"
