"""Who may talk to whom in the clear: only processes of one machine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from ravnest.types import Address

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # what a user writes for "this machine"


@dataclass(frozen=True)
class Credentials:
    """What a node shows and what it trusts, as PEM; its certificate's common name is ``node_<i>``."""

    authority: bytes
    certificate: bytes
    key: bytes


def is_loopback(address: Address) -> bool:
    """Whether nobody else can reach a listener at this address, so that it needs no TLS.

    Both sides decide by the address in the plan. 0.0.0.0 is everywhere, although its own machine
    dials it by loopback.
    """
    if address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def dialled(address: Address) -> Address:
    """Where to find a listener from here."""
    return replace(address, host="127.0.0.1") if address.host in _EVERYWHERE else address
