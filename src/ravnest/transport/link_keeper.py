"""Open links of a transport: heartbeats, new connections for those that have lost theirs, the end."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from ravnest.deadlines import (
    LINK_CLOSE,
    LINK_DIRECT_RETRY,
    LINK_DIRECT_RETRY_MOST,
    LINK_GONE,
    LINK_HEARTBEAT,
    LINK_HELLO,
    LINK_OUTAGE,
)
from ravnest.errors import LinkClosedError, RefusedError, TransportError
from ravnest.tracing.recorder import SpanRecorder
from ravnest.transport.base import LinkHandler
from ravnest.transport.link import FrameLink
from ravnest.transport.routes import Unanswered
from ravnest.types import Address
from ravnest.wire.frames import DEFAULT_LIMITS
from ravnest.wire.header import Limits
from ravnest.wire.messages import Hello

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_FOLLOWER_PAUSE = 1.0
"""First pause of the side that did not open the link: normally the other one dials."""
_REMEMBERED = 64
"""Ended links whose ids are remembered, so that a peer that dials again learns about the end."""

logger = logging.getLogger(__name__)


Redial = Callable[[FrameLink, Sequence[Address], float], Unanswered | None]
"""Function that dials a link's peer once, within a number of seconds; returns None after a success."""
LeaveRelay = Callable[[FrameLink, Sequence[Address], float], bool]
"""Function that connects a link that passes a relay directly, if that is possible now."""


@dataclass
class _Retry:
    """Attempts of a link to do without its relay."""

    due: float
    pause: float


class LinkKeeper:
    """Links of a transport by session; all methods may be called from any thread."""

    def __init__(
        self,
        redial: Redial,
        outage: float = LINK_OUTAGE,
        leave_relay: LeaveRelay | None = None,
        trace: SpanRecorder | None = None,
    ) -> None:
        """``outage`` is the time for which a link without a connection is kept.

        ``trace`` records the messages of all links.
        """
        self._trace = trace
        self._redial = redial
        self._outage = outage
        self._leave_relay = leave_relay
        self._retries: dict[str, _Retry] = {}
        self._lock = threading.Lock()
        self._links: dict[str, FrameLink] = {}
        self._addresses: dict[str, list[Address]] = {}
        self._reconnecting: set[str] = set()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._closed = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def open(
        self,
        local: Hello,
        peer: Hello,
        handler: LinkHandler,
        session: str,
        dialled: Sequence[Address],
        limits: Limits = DEFAULT_LIMITS,
    ) -> FrameLink:
        """Return a new link; ``dialled`` are the peer's addresses if this side opens it.

        ``LinkClosedError`` if this side closes its links: the peer would wait for a node that never
        answers. A peer has one link of those that it opens: a new one ends the one before, which its
        process has given up, or a process before it had.
        """
        link = FrameLink(
            local,
            structs.replace(peer, session="", nonce="", proof=""),
            handler,
            session=session,
            leads=bool(dialled),
            on_down=self._down,
            on_end=self._end,
            limits=limits,
            trace=self._trace,
        )
        named = [Address.parse(each) for each in peer.addresses]
        with self._lock:
            if self._closed.is_set():
                raise LinkClosedError("this node is closing its links")
            before = [] if dialled else self._opened_by(peer.node, link.session)
            self._links[link.session] = link
            self._addresses[link.session] = list(dialled) or named
            if self._heartbeat is None and not self._closed.is_set():
                self._heartbeat = threading.Thread(
                    target=self._beat, name="ravnest heartbeat", daemon=True
                )
                self._heartbeat.start()
        for each in before:
            each.fail(f"node_{peer.node} has opened another link")
        return link

    def _opened_by(self, node: int, session: str) -> list[FrameLink]:
        """Return the links that a peer has opened, without that of ``session``; holds the lock."""
        found = (each for each in self._links.values() if each.peer.node == node and not each.leads)
        return [each for each in found if each.session != session]

    def find(self, session: str) -> FrameLink | None:
        """Return the link with this id; ``RefusedError`` if it has ended."""
        with self._lock:
            if session in self._ended:
                raise RefusedError("this link has ended")
            return self._links.get(session)

    def _end(self, link: FrameLink) -> None:
        """Forget a link that is over."""
        with self._lock:
            self._links.pop(link.session, None)
            self._addresses.pop(link.session, None)
            self._retries.pop(link.session, None)
            self._ended[link.session] = None
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def _down(self, link: FrameLink, detail: str) -> None:
        """Connect a link again in the background."""
        if self._outage <= 0 or self._closed.is_set():
            link.abandon(detail)
            return
        with self._lock:
            if link.session in self._reconnecting:
                return
            self._reconnecting.add(link.session)
        threading.Thread(
            target=self._reconnect, args=(link, detail), name=f"reconnect {link!r}", daemon=True
        ).start()

    def drop(self, node: int, generation: int, reason: str) -> None:
        """End the links to a node that has this generation, or an earlier one, as lost ones."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            if link.peer.node == node and link.peer.generation <= generation:
                link.fail(reason)

    def close(self) -> None:
        """Close all links in parallel."""
        self._closed.set()
        with self._lock:
            links = list(self._links.values())
        threads = [threading.Thread(target=link.close, daemon=True) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * LINK_CLOSE)  # each link gives up earlier by itself

    @property
    def closed(self) -> threading.Event:
        """Event that is set when the links are closed."""
        return self._closed

    def _beat(self) -> None:
        while not self._closed.wait(LINK_HEARTBEAT / 2):
            with self._lock:
                links = list(self._links.values())
            now = time.monotonic()
            for link in links:
                link.tick(now)
                if self._leave_relay is not None and link.route == "relayed":
                    self._retry_direct(link, now, self._leave_relay)

    def _retry_direct(self, link: FrameLink, now: float, leave_relay: LeaveRelay) -> None:
        """Try the peer's own addresses if that is due, in a thread."""
        with self._lock:
            retry = self._retries.setdefault(
                link.session, _Retry(now + LINK_DIRECT_RETRY, LINK_DIRECT_RETRY)
            )
            addresses = self._addresses.get(link.session, [])
            if now < retry.due or not addresses:
                return
            retry.due = now + retry.pause * random.uniform(0.7, 1.3)  # noqa: S311  # no secret
            retry.pause = min(2 * retry.pause, LINK_DIRECT_RETRY_MOST)

        def attempt() -> None:
            if leave_relay(link, addresses, LINK_HELLO) and link.await_connection(LINK_HELLO):
                logger.info("%r no longer needs a relay", link)

        threading.Thread(target=attempt, name=f"leave relay {link!r}", daemon=True).start()

    def _reconnect(self, link: FrameLink, detail: str) -> None:
        peer = link.peer.node
        logger.warning(
            "node_%d has lost the connection to node_%d (%s); it tries to connect again for %g s",
            link.local.node,
            peer,
            detail,
            self._outage,
        )
        begin = time.monotonic()
        reason = self._redial_until(link, begin + self._outage)
        with self._lock:
            self._reconnecting.discard(link.session)
        seconds = time.monotonic() - begin
        if reason is not None:
            link.abandon(f"{detail}; {reason}")
        elif link.alive:
            logger.warning(
                "node_%d is connected to node_%d again after %.1f s", link.local.node, peer, seconds
            )
            if not link.connected:  # it was lost in the meantime
                self._down(link, detail)

    def _redial_until(self, link: FrameLink, deadline: float) -> str | None:
        """Dial until there is a connection or the link is over; return the reason of a failure."""
        pause = _FIRST_PAUSE if link.leads else _FOLLOWER_PAUSE
        silent_since: float | None = None
        last = ""
        while not link.await_connection(pause * random.uniform(0.7, 1.3)):  # noqa: S311  # no secret
            now = time.monotonic()
            if now >= deadline:
                return f"no connection for {self._outage:g} s" + (f" ({last})" if last else "")
            try:
                failure = self._dial(link, min(deadline - now, LINK_HELLO))
            except RefusedError as error:
                return str(error)
            if failure is None:
                silent_since = None
                if link.await_connection(LINK_HELLO):
                    return None
            else:
                last = failure.reason
                if not failure.nothing_listens:
                    silent_since = None
                elif silent_since is None:
                    silent_since = time.monotonic()
                elif time.monotonic() - silent_since >= LINK_GONE:
                    return last
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def _dial(self, link: FrameLink, seconds: float) -> Unanswered | None:
        """Try the peer's addresses once: where the link was opened, or those that the peer named."""
        with self._lock:
            addresses = self._addresses.get(link.session, [])
        if not addresses:
            return Unanswered("the peer has to dial")
        try:
            return self._redial(link, addresses, seconds)
        except RefusedError:
            raise
        except TransportError as error:
            return Unanswered(str(error))
