"""Rendezvous of a node with its neighbours in the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ravnest.errors import RunError, UnreachableError
from ravnest.store.node_spec import NeighbourSpec, NodeSpec
from ravnest.transport.base import Link, LinkHandler, Transport
from ravnest.transport.generations import Generations
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Hello, HelloRefused, Message

SHARED_SETTINGS = ("averaging", "average_optim", "ema")
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


class _NotNeededError(Exception):
    """The neighbour that is dialled has connected itself."""


class _Places:
    """Links to the neighbours as they connect; thread-safe."""

    def __init__(self, spec: NodeSpec, handler: LinkHandler) -> None:
        self._spec = spec
        self._handler = handler
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._error: Exception | None = None
        self._complete = False

    def take(self, link: Link) -> None:
        """Add the link of a neighbour. If training is under way, the neighbour was started again."""
        with self._changed:
            before = self._links.get(link.peer.node)
            self._links[link.peer.node] = link
            complete = self._complete
            self._changed.notify_all()
        if complete and before is not None:
            self._handler.on_lost(before, f"node_{link.peer.node} has started again")

    def fail(self, error: Exception) -> None:
        """End the wait with an error, unless everybody is connected."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def has(self, node: int) -> bool:
        """Return whether a neighbour is connected."""
        with self._changed:
            return node in self._links

    def wait(self, timeout: float, missing: Callable[[NeighbourSpec], Exception]) -> Links:
        """Wait for all neighbours; ``missing`` makes the error if one does not connect in time."""
        neighbours = [each for each in (self._spec.previous, self._spec.next) if each is not None]
        absent: list[NeighbourSpec] = []

        def ready() -> bool:
            absent[:] = [each for each in neighbours if each.node not in self._links]
            return not absent or self._error is not None

        with self._changed:
            self._changed.wait_for(ready, timeout)
            if absent:
                raise self._error or missing(absent[0])
            self._complete = True
            links = [
                None if each is None else self._links[each.node]
                for each in (self._spec.previous, self._spec.next)
            ]
        return Links(*links)


@dataclass(frozen=True)
class Rendezvous:
    """Connection of a node to its neighbours at the start of a run."""

    spec: NodeSpec
    hello: Hello
    listen: Address
    timeout: float
    say: Callable[[str], None]
    """Prints a line for the user."""
    generations: Generations
    """Processes that were seen of the neighbours, in this run and earlier ones."""

    def listen_and_dial(
        self, transport: Transport, handler: LinkHandler, others: ClusterLinkHandler | None = None
    ) -> Links:
        """Connect to both neighbours and return the links; they may start in any order.

        Each node dials the next one. A node that takes the place of another dials the neighbours that do
        not know its address, at their next starts too, so that these do not dial it. ``RunError`` names
        the neighbour that is missing. ``others`` receives the links of nodes of other clusters, which
        may connect at any time.
        """
        spec = self.spec
        if spec.previous is None and spec.next is None and others is None:
            return Links()
        places = _Places(spec, handler)

        def on_link(link: Link) -> None:
            if others is not None and link.peer.cluster != spec.cluster:
                others.on_link(link)
            else:
                places.take(link)

        advertised = Address.parse(spec.address)
        router = handler if others is None else _Router(spec.cluster, handler, others)
        transport.serve(self.listen, self._admit, router, on_link, known_as=advertised)
        dialled = (
            spec.next if spec.dials_next else None,
            spec.previous if spec.dials_previous else None,
        )
        for neighbour in dialled:
            if neighbour is not None and not self._dials_us(neighbour):
                self._dial(neighbour, transport, handler, places)
        if spec.previous is not None and not places.has(spec.previous.node):
            self.say(f"{self._name} waits for {_named(spec.previous)} to connect")
        return places.wait(self.timeout, self._missing)

    def _dial(
        self, neighbour: NeighbourSpec, transport: Transport, handler: LinkHandler, places: _Places
    ) -> None:
        """Dial a neighbour in a thread, until it is connected in either direction."""

        def waiting(reason: str) -> None:
            if places.has(neighbour.node):
                raise _NotNeededError
            self.say(f"{self._name} waits for {_named(neighbour)}: {reason}")

        planned = Address.parse(neighbour.address), *neighbour.further
        addresses = self.generations.addresses(neighbour.node, planned)

        def dial() -> None:
            try:
                link = transport.dial(
                    addresses[0],
                    self.hello,
                    handler,
                    deadline=self.timeout,
                    waiting=waiting,
                    expect=neighbour.node,
                    others=addresses[1:],
                )
            except _NotNeededError:
                return
            except UnreachableError as error:
                places.fail(
                    UnreachableError(
                        f"{self.spec.name} cannot reach {_named(neighbour)}: {error}; start it, or "
                        "check that this machine can reach the address"
                    )
                )
            except Exception as error:  # top of the thread: the waiting thread raises it
                places.fail(error)
            else:
                if self.generations.admit(link.peer) is None:
                    places.take(link)
                else:  # another machine has its place, and dials this node
                    link.close()

        name = f"ravnest-dial-{self.spec.name}-{neighbour.node}"
        threading.Thread(target=dial, name=name, daemon=True).start()

    def _dials_us(self, neighbour: NeighbourSpec) -> bool:
        """Return whether another machine has the neighbour's place, at an address that is not planned.

        Such a machine dials. Two connections would look like a neighbour that was started again.
        """
        newest = self.generations.newest(neighbour.node)
        if newest is None or not newest.generation or not newest.addresses:
            return False
        return {neighbour.address, *neighbour.others}.isdisjoint(newest.addresses)

    def _missing(self, neighbour: NeighbourSpec) -> RunError:
        return RunError(
            f"{_named(neighbour)} has not connected to {self.spec.name} at {self.listen} in "
            f"{self.timeout:.0f} s: start it, or check that it can reach this address"
        )

    @property
    def _name(self) -> str:
        return f"{self.spec.name} ({self.spec.role})"

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
        if not self.generations.is_current(hello):
            return HelloRefused(self.generations.admit(hello) or "")
        if hello.cluster != own.cluster:
            return self._admit_other(hello)
        following = self.spec.next
        replaces_next = following is not None and hello.node == following.node and hello.generation > 0
        if not replaces_next and (previous is None or hello.node != previous.node):
            return HelloRefused(f"node_{hello.node} is not the previous node of {self.spec.name}")
        if self.spec.pipeline[hello.stage : hello.stage + 1] != (hello.node,):
            return HelloRefused(f"node_{hello.node} is not stage {hello.stage} of its cluster")
        answer = self._compare(hello, own.settings, "all nodes of a cluster need the same")
        if isinstance(answer, Hello):
            self.generations.admit(hello)
        return answer

    def _admit_other(self, hello: Hello) -> Hello | HelloRefused:
        """Accept only members of this node's rings and, at a Root, other Roots."""
        spec = self.spec
        lists = [*(ring.members for ring in spec.rings), *([spec.roots] if spec.stage == 0 else [])]
        known = {(c, member.node) for members in lists for c, member in enumerate(members)}
        if (hello.cluster, hello.node) not in known:
            return HelloRefused(
                f"node_{hello.node} of cluster {hello.cluster} shares no ring with {spec.name}"
            )
        if (hello.stage == 0) != (hello.node == spec.roots[hello.cluster].node):
            return HelloRefused(f"node_{hello.node} is not stage {hello.stage} of its cluster")
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
