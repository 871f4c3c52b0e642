"""Credentials, settings of TLS, and which connections are encrypted: all except those on loopback."""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

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


@lru_cache(maxsize=8)
def dialling_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the settings of the side that dials."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials)


@lru_cache(maxsize=8)
def listening_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the settings of the side that listens: peers need a certificate too."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    context.num_tickets = 0  # sessions are not resumed, and nothing follows the handshake
    return context


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    """Return settings for mutual TLS with the authority of the plan, and no other."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # peers are known by their names in the plan, not by addresses
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
    with tempfile.TemporaryDirectory() as folder:  # only its owner can read it
        path = Path(folder, "identity.pem")
        path.write_bytes(credentials.certificate + credentials.key)
        context.load_cert_chain(path)
    return context
