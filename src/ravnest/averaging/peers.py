"""Links to nodes of other clusters: those in our rings, and between Roots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ravnest.errors import RavnestError, UnreachableError
from ravnest.store.node_spec import NeighbourSpec, NodeSpec
from ravnest.transport.base import Link, LinkHandler, Transport
from ravnest.transport.link import send_and_close
from ravnest.types import Address
from ravnest.wire.messages import AnyHead, Hello

logger = logging.getLogger(__name__)

REACH_SECONDS = 10.0
"""In the middle of a round: whoever does not answer by then is left out of it."""


class PeerError(UnreachableError):
    """A node of another cluster cannot be reached."""

    def __init__(self, message: str, cluster: int) -> None:
        super().__init__(message)
        self.cluster = cluster


class Peers:
    """One link for each node of another cluster; all methods may be called from any thread.

    The Root of the later cluster dials that of the earlier; in a ring each node dials the next.
    """

    def __init__(
        self, place: NodeSpec, hello: Hello, transport: Transport, handler: LinkHandler
    ) -> None:
        self._place = place
        self._hello = hello
        self._transport = transport
        self._handler = handler
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        """The newest to each node."""
        self._open: list[Link] = []
        """All of them: two nodes that dial each other at once have two."""
        self._closed = False
        self._gave_up = False
        self._clamped = 0

    def keep(self, link: Link) -> None:
        """A link is open; it takes the place of an earlier one to the same node."""
        with self._changed:
            self._links[link.peer.node] = link
            if link not in self._open:
                self._open.append(link)
            self._changed.notify_all()

    def forget(self, link: Link) -> bool:
        """A link is gone; whether it was the one in use."""
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
        """Values beyond the range of the codec that were sent, on all links so far."""
        with self._changed:
            return self._clamped + sum(link.clamped for link in self._open)

    def root(self, cluster: int) -> Link | None:
        """To the Root of a cluster, if it is there."""
        with self._changed:
            return self._links.get(self._place.roots[cluster].node)

    def cluster_of(self, node: int) -> int | None:
        """The cluster of a node in one of our rings, or of a Root."""
        lists = [self._place.roots, *(ring.members for ring in self._place.rings)]
        return next(
            (c for members in lists for c, member in enumerate(members) if member.node == node), None
        )

    def reach(self, peer: NeighbourSpec, cluster: int) -> Link:
        """A link to a node of a ring; ``PeerError`` if there is none to be had soon."""
        with self._changed:
            link = self._links.get(peer.node)
        if link is not None:
            return link
        try:
            link = self._dial(peer, REACH_SECONDS)
        except RavnestError as error:
            raise PeerError(f"node_{peer.node} of cluster {cluster}: {error}", cluster) from error
        self.keep(link)
        return link

    def meet(self, timeout: float, say: Callable[[str], None], met: Callable[[Link], None]) -> set[int]:
        """At a Root: find the Roots of the other clusters; those that are still missing in the end."""
        for cluster in range(self._place.cluster):
            self.find(cluster, timeout, met, say)
        later = sorted(cluster for cluster in self._missing() if cluster > self._place.cluster)
        for cluster in later:
            root = self._place.roots[cluster]
            say(
                f"{self._place.name} ({self._place.role}) waits for cluster {cluster} to connect: "
                f"node_{root.node} at {root.address}"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._gave_up or not self._missing(), timeout)
            return self._missing()

    def give_up(self) -> None:
        """There is no use in waiting for others any more."""
        with self._changed:
            self._gave_up = True
            self._changed.notify_all()

    def _missing(self) -> set[int]:
        others = set(range(len(self._place.roots))) - {self._place.cluster}
        return {cluster for cluster in others if self.root(cluster) is None}

    def find(
        self,
        cluster: int,
        timeout: float,
        met: Callable[[Link], None],
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Dial the Root of an earlier cluster in the background, for as long as it takes.

        ``met`` gets the link. ``say`` is told what is waited for in the first ``timeout`` seconds.
        """
        root = self._place.roots[cluster]
        waiting = f"{self._place.name} ({self._place.role}) waits for cluster {cluster}"

        def dial() -> None:
            told = None if say is None else lambda why: say(f"{waiting}: {why}")
            while not self._closed:
                try:
                    link = self._dial(root, timeout, told)
                except UnreachableError:
                    told = None
                except RavnestError as error:
                    logger.warning("cluster %d cannot be joined: %s", cluster, error)
                    return
                else:
                    self.keep(link)
                    met(link)
                    return

        threading.Thread(target=dial, name=f"find cluster {cluster}", daemon=True).start()

    def close(self, last: AnyHead | None) -> None:
        """Hang up, with a last word where there is one."""
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
        """Whether no link is wanted any more."""
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
        )
