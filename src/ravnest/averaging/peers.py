"""Links to nodes of other clusters: members of the same rings and, at a Root, other Roots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ravnest.errors import RavnestError, UnreachableError
from ravnest.store.node_spec import NeighbourSpec, NodeSpec
from ravnest.transport.base import Link, LinkHandler, Transport, send_and_close
from ravnest.types import Address
from ravnest.wire.messages import AnyHead, Hello

logger = logging.getLogger(__name__)


class PeerError(UnreachableError):
    """A node of another cluster cannot be reached."""

    def __init__(self, message: str, cluster: int) -> None:
        super().__init__(message)
        self.cluster = cluster


class Peers:
    """One link per node of another cluster; all methods may be called from any thread.

    The Root of the higher cluster dials the Root of the lower one; in a ring each node dials the next.
    """

    def __init__(self, spec: NodeSpec, hello: Hello, transport: Transport, handler: LinkHandler) -> None:
        self._spec = spec
        self._hello = hello
        self._transport = transport
        self._handler = handler
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        """The newest link to each node."""
        self._open: list[Link] = []
        """All open links: two nodes that dial each other at the same time have two."""
        self._closed = False
        self._gave_up = False
        self._clamped = 0

    def keep(self, link: Link) -> None:
        """Add an open link; it replaces an earlier one to the same node."""
        with self._changed:
            self._links[link.peer.node] = link
            if link not in self._open:
                self._open.append(link)
            self._changed.notify_all()

    def forget(self, link: Link) -> bool:
        """Remove a link that is gone, and return True if it was the one in use."""
        with self._changed:
            if link in self._open:
                self._open.remove(link)
                self._clamped += link.clamped
            if self._links.get(link.peer.node) is not link:
                return False
            del self._links[link.peer.node]
            return True

    @property
    def clamped(self) -> int:
        """Values sent so far that were clamped to the range of the codec, on all links."""
        with self._changed:
            return self._clamped + sum(link.clamped for link in self._open)

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
        with self._changed:
            link = self._links.get(peer.node)
        if link is not None:
            return link
        try:
            link = self._dial(peer, seconds)
        except RavnestError as error:
            raise PeerError(f"node_{peer.node} of cluster {cluster}: {error}", cluster) from error
        self.keep(link)
        return link

    def connect(
        self, timeout: float, say: Callable[[str], None], on_link: Callable[[Link], None]
    ) -> set[int]:
        """Connect a Root to the Roots of the other clusters; return those missing after ``timeout``."""
        for cluster in range(self._spec.cluster):
            self.dial_root(cluster, timeout, on_link, say)
        higher = sorted(cluster for cluster in self._missing() if cluster > self._spec.cluster)
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
        """Dial the Root of a lower cluster in the background until it answers.

        ``on_link`` receives the link. ``say`` receives the reasons for waiting during the first
        ``timeout`` seconds.
        """
        root = self._spec.roots[cluster]
        waiting = f"{self._spec.name} ({self._spec.role}) waits for cluster {cluster}"

        def dial() -> None:
            waits = None if say is None else lambda why: say(f"{waiting}: {why}")
            while not self._closed:
                try:
                    link = self._dial(root, timeout, waits)
                except UnreachableError:
                    waits = None
                except RavnestError as error:
                    logger.warning("cluster %d refuses the connection: %s", cluster, error)
                    return
                else:
                    on_link(link)  # first, because ``connect`` may return after ``keep``
                    self.keep(link)
                    return

        threading.Thread(target=dial, name=f"ravnest-dial-cluster-{cluster}", daemon=True).start()

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
        return self._transport.dial(
            Address.parse(peer.address),
            self._hello,
            self._handler,
            deadline=seconds,
            waiting=waiting,
            expect=peer.node,
            others=peer.further,
        )
