"""Words to peers that may be gone, where it does not matter if they are."""

from __future__ import annotations

import logging

from ravnest.errors import RavnestError
from ravnest.transport.base import Link
from ravnest.wire.messages import AnyHead, Message

logger = logging.getLogger(__name__)


def try_send(link: Link, head: AnyHead) -> None:
    """Send; whoever is gone misses nothing, and the loss is told by the link itself."""
    try:
        link.send(Message(head))
    except RavnestError:
        logger.debug("node_%d is gone already", link.peer.node)


def part(link: Link, last: AnyHead | None) -> None:
    """Close a link, with a last word if there is one."""
    if last is not None:
        try_send(link, last)
    link.close()
