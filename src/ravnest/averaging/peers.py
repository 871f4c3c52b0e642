"""Links to nodes of other clusters: members of the same rings and, at a Root, other Roots."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from ravnest.errors import RavnestError, RefusedError, UnreachableError
from ravnest.store.node_spec import NeighbourSpec, NodeSpec
from ravnest.transport.base import Link, LinkHandler, Transport, send_and_close
from ravnest.transport.generations import Generations
from ravnest.types import Address
from ravnest.wire.messages import AnyHead, Hello, Message

logger = logging.getLogger(__name__)

REDIAL_SECONDS = 60.0
"""Deadline of one attempt to connect to a node of another cluster; attempts follow each other."""


class PeerError(UnreachableError):
    """A node of another cluster cannot be reached."""

    def __init__(self, message: str, cluster: int) -> None:
        super().__init__(message)
        self.cluster = cluster


class IgnoringHandler:
    """Handler of links over which only this side speaks."""

    def on_message(self, link: Link, message: Message) -> None:
        """Ignore a message."""

    def on_lost(self, link: Link, reason: str) -> None:
        """Ignore a loss."""


class Peers:
    """One link per node of another cluster; all methods may be called from any thread.

    The Root of the higher cluster dials the Root of the lower one; in a ring each node dials the next.
    A machine that has taken the place of another one dials all of them, because they do not know its
    address; from then on they use the addresses in its Hello.
    """

    def __init__(
        self,
        spec: NodeSpec,
        hello: Hello,
        transport: Transport,
        handler: LinkHandler,
        *,
        generations: Generations | None = None,
        on_replaced: Callable[[Link], None] = lambda _: None,
    ) -> None:
        """``on_replaced`` is called with each link to a process whose place another one has taken."""
        self._spec = spec
        self._hello = hello
        self._transport = transport
        self._handler = handler
        self._generations = generations or Generations()
        self._on_replaced = on_replaced
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        """The newest link to each node."""
        self._open: list[Link] = []
        """All open links: two nodes that dial each other at the same time have two."""
        self._gone: weakref.WeakSet[Link] = weakref.WeakSet()
        """Links that were lost: the thread that has dialled one may keep it only afterwards."""
        self._closed = False
        self._gave_up = False
        self._clamped = 0
        self._received_bytes = 0
        self._sent_bytes = 0

    def keep(self, link: Link) -> bool:
        """Add an open link; it replaces earlier ones to the same node.

        Return False if it was lost meanwhile, or if another process has taken the place of the peer; the
        link is closed then.
        """
        node = link.peer.node
        reason = self._generations.admit(link.peer)
        with self._changed:
            if link in self._gone:
                return False
            if reason is None:
                self._links[node] = link
                if link not in self._open:
                    self._open.append(link)
                self._changed.notify_all()
            left = [each for each in self._open if each.peer.node == node and not self.is_current(each)]
        for each in left:
            self._on_replaced(each)
            self.forget(each)
        for each in [*left, *([] if reason is None else [link])]:
            # A thread, because closing waits for the peer, and this one may serve a link.
            threading.Thread(target=each.close, name=f"close {each!r}", daemon=True).start()
        if reason is not None:
            logger.warning("%s; its connection is closed", reason)
        return reason is None

    def is_current(self, link: Link) -> bool:
        """Return False if another process has taken the place of the peer of a link."""
        return self._generations.is_current(link.peer)

    def is_member(self, peer: Hello) -> bool:
        """Return whether a peer's Hello names the place that its node has in the plan.

        Its node is proved, but cluster and stage are its own words: a node of a ring could pose as the
        Root of its cluster, or as one of another cluster.
        """
        cluster = self.cluster_of(peer.node)
        if cluster is None or peer.plan != self._hello.plan:
            return False
        is_root = peer.node == self._spec.roots[cluster].node
        return peer.cluster == cluster and is_root == (peer.stage == 0)

    def forget(self, link: Link) -> bool:
        """Remove a link that is gone, and return True if it was the one in use."""
        with self._changed:
            self._gone.add(link)
            if link in self._open:
                self._open.remove(link)
                self._clamped += link.clamped
                self._received_bytes += link.received_bytes
                self._sent_bytes += link.sent_bytes
            if self._links.get(link.peer.node) is not link:
                return False
            del self._links[link.peer.node]
            return True

    @property
    def clamped(self) -> int:
        """Values sent so far that were clamped to the range of the codec, on all links."""
        with self._changed:
            return self._clamped + sum(link.clamped for link in self._open)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far, on all links."""
        with self._changed:
            received = self._received_bytes + sum(link.received_bytes for link in self._open)
            return received, self._sent_bytes + sum(link.sent_bytes for link in self._open)

    def root(self, cluster: int) -> Link | None:
        """Return the link to the Root of a cluster, if it is connected."""
        with self._changed:
            return self._links.get(self._spec.roots[cluster].node)

    def cluster_of(self, node: int) -> int | None:
        """Return the cluster of a Root, or of a node in one of this node's rings."""
        lists = [self._spec.roots, *(ring.members for ring in self._spec.rings)]
        return next(
            (c for members in lists for c, member in enumerate(members) if member.node == node), None
        )

    def reach(self, peer: NeighbourSpec, cluster: int, seconds: float) -> Link:
        """Return a link to a node of a ring, dialled if needed; raises ``PeerError`` if that fails.

        The peer is dialled for ``seconds``: its network may be away when the round begins.
        """
        failures: list[RavnestError] = []

        def dial() -> None:
            try:
                if not self.keep(self._dial(peer, seconds)):
                    raise UnreachableError("its process ended while it connected")
            except RavnestError as error:
                with self._changed:
                    failures.append(error)
                    self._changed.notify_all()

        with self._changed:
            link = self._links.get(peer.node)
            if link is None:
                # In a thread, because the peer may connect first, from an address that is not known.
                threading.Thread(target=dial, name=f"ravnest-dial-{peer.node}", daemon=True).start()
                self._changed.wait_for(
                    lambda: self._closed or bool(failures) or peer.node in self._links, seconds
                )
                link = self._links.get(peer.node)
        if link is None:
            reason = failures[0] if failures else f"no answer in {seconds:g} s"
            raise PeerError(f"node_{peer.node} of cluster {cluster}: {reason}", cluster)
        return link

    def introduce(self) -> None:
        """Dial all members of this node's rings in the background, if it has replaced another machine.

        They would dial the address of the machine before.
        """
        if not self._hello.generation:
            return
        spec = self._spec
        members = {
            member.node: (cluster, member)
            for ring in spec.rings
            for cluster, member in enumerate(ring.members)
            if cluster != spec.cluster
        }
        for cluster, member in members.values():
            if spec.stage or member.node != spec.roots[cluster].node:  # ``connect`` dials Roots
                self._dial_until_linked(member, cluster, REDIAL_SECONDS, lambda _: None)

    def connect(
        self, timeout: float, say: Callable[[str], None], on_link: Callable[[Link], None]
    ) -> set[int]:
        """Connect a Root to the Roots of the other clusters; return those missing after ``timeout``."""
        dialled = set(range(self._spec.cluster))
        if self._hello.generation:
            dialled = set(range(len(self._spec.roots))) - {self._spec.cluster}
        for cluster in sorted(dialled):
            self.dial_root(cluster, timeout, on_link, say)
        higher = sorted(self._missing() - dialled)
        for cluster in higher:
            root = self._spec.roots[cluster]
            say(
                f"{self._spec.name} ({self._spec.role}) waits for cluster {cluster} to connect: "
                f"node_{root.node} at {root.address}"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._gave_up or not self._missing(), timeout)
            return self._missing()

    def give_up(self) -> None:
        """Stop waiting for other clusters."""
        with self._changed:
            self._gave_up = True
            self._changed.notify_all()

    def _missing(self) -> set[int]:
        others = set(range(len(self._spec.roots))) - {self._spec.cluster}
        return {cluster for cluster in others if self.root(cluster) is None}

    def dial_root(
        self,
        cluster: int,
        timeout: float,
        on_link: Callable[[Link], None],
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Dial the Root of another cluster in the background until it answers, or has connected.

        ``on_link`` receives the link. ``say`` receives the reasons for waiting during the first
        ``timeout`` seconds.
        """
        root = self._spec.roots[cluster]
        waiting = f"{self._spec.name} ({self._spec.role}) waits for cluster {cluster}"
        waits = None if say is None else lambda why: say(f"{waiting}: {why}")
        self._dial_until_linked(root, cluster, timeout, on_link, waits)

    def _dial_until_linked(
        self,
        peer: NeighbourSpec,
        cluster: int,
        timeout: float,
        on_link: Callable[[Link], None],
        waits: Callable[[str], None] | None = None,
    ) -> None:
        """Dial a peer in the background until there is a link; ``waits`` gets reasons at first."""

        def dial() -> None:
            waiting = waits
            while not self._closed and self._link_to(peer.node) is None:
                try:
                    link = self._dial(peer, timeout, waiting)
                except UnreachableError:
                    waiting = None
                except RavnestError as error:
                    logger.warning("cluster %d refuses the connection: %s", cluster, error)
                    return
                else:
                    on_link(link)  # first, because ``connect`` may return after ``keep``
                    if self.keep(link):
                        return

        threading.Thread(target=dial, name=f"ravnest-dial-cluster-{cluster}", daemon=True).start()

    def _link_to(self, node: int) -> Link | None:
        with self._changed:
            return self._links.get(node)

    def say_goodbye(self, last: AnyHead, seconds: float) -> None:
        """Dial the Roots of all other clusters once and send a last message to those that answer."""

        def say(root: NeighbourSpec) -> None:
            try:
                send_and_close(self._dial(root, seconds), last, seconds)
            except RavnestError as error:
                logger.info("node_%d does not learn of the end: %s", root.node, error)

        others = [root for c, root in enumerate(self._spec.roots) if c != self._spec.cluster]
        threads = [threading.Thread(target=say, args=(root,), daemon=True) for root in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * seconds)

    def close(self, last: AnyHead | None) -> None:
        """Close all links, with ``last`` as the last message if given."""
        with self._changed:
            self._closed = self._gave_up = True
            links, self._open = self._open, []
            self._clamped += sum(link.clamped for link in links)
            self._links.clear()
            self._changed.notify_all()
        for link in links:
            send_and_close(link, last)

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._closed

    def _dial(
        self, peer: NeighbourSpec, seconds: float, waiting: Callable[[str], None] | None = None
    ) -> Link:
        planned = Address.parse(peer.address), *peer.further
        addresses = self._generations.addresses(peer.node, planned)
        link = self._transport.dial(
            addresses[0],
            self._hello,
            self._handler,
            deadline=seconds,
            waiting=waiting,
            expect=peer.node,
            others=addresses[1:],
        )
        reason = None if self.is_member(link.peer) else f"node_{peer.node} names a place of another node"
        reason = reason or self._generations.admit(link.peer)
        if reason is not None:
            link.close()
            raise RefusedError(reason)
        return link
