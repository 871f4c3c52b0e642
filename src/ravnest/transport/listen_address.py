"""Addresses at which a node listens, and the errors of those at which it cannot."""

from __future__ import annotations

import errno
import socket

from ravnest.errors import AddressInUseError, TransportError
from ravnest.types import Address

MAX_LINKS = 256
"""Maximum number of concurrent connections of a listener; protects it against exhaustion."""


def bound_socket(address: Address) -> socket.socket:
    """Return a socket that is bound to the address; the caller closes it."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, _, _, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(target)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise _explained(address, error) from error
    return bound


def _explained(address: Address, error: OSError) -> TransportError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUseError(
            f"{address} is in use: stop the process that listens there, or choose another port for"
            " this node in node_configs.json"
        )
    return TransportError(
        f"cannot listen at {address}: {error.strerror or error}. It must be an address of this"
        " machine, with a port above 1023"
    )
