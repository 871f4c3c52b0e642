"""Access of a node to relays."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.relay.tickets import Endpoint
from ravnest.types import Address


@dataclass(frozen=True)
class RelayAccess:
    """Relays that a node may use, and its ticket for them."""

    relays: tuple[tuple[Address, ...], ...]
    """Addresses of each relay, the relay to prefer first."""
    endpoint: Endpoint
    """Name of this node at the relays."""
    ticket: str
