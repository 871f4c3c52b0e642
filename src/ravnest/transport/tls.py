"""Credentials, and the decision which connections are encrypted: all except loopback."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from ravnest.types import Address

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # what a user writes for "this machine"


@dataclass(frozen=True)
class Credentials:
    """Certificate, key and trusted authority of a node (PEM); the common name is ``node_<i>``."""

    authority: bytes
    certificate: bytes
    key: bytes


def is_loopback(address: Address) -> bool:
    """Return whether only this machine can reach a listener at the address, so that TLS is not needed.

    Both sides decide by the address in the plan. 0.0.0.0 can be reached from everywhere, although its
    own machine dials it by loopback.
    """
    if address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def dial_address(address: Address) -> Address:
    """Return the address at which this machine can dial a listener."""
    return replace(address, host="127.0.0.1") if address.host in _EVERYWHERE else address
