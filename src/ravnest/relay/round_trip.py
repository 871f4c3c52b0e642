"""Measured round trip to a relay, by which the nearest one is chosen."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ravnest.errors import RelayError
from ravnest.relay.heads import PING_PATH, HeadReader, RelayMethod, parse_answer, request
from ravnest.relay.sockets import dial_first
from ravnest.types import Address

_TRIES = 3


def relay_round_trip(addresses: Sequence[Address], timeout: float) -> float | None:
    """Return the shortest of a few round trips to a relay in seconds, ``None`` if it does not answer."""
    deadline = time.monotonic() + timeout
    connection = dial_first(addresses, timeout)
    if connection is None:
        return None
    shortest: float | None = None
    with connection:
        for _ in range(_TRIES):
            begin = time.monotonic()
            try:
                connection.settimeout(max(deadline - begin, 0.001))
                connection.sendall(request(RelayMethod.GET, PING_PATH))
                head = HeadReader()
                while (found := head.feed(_received(connection.recv(head.room)))) is None:
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
                status, _reason = parse_answer(found[0])
            except (OSError, RelayError):
                return shortest
            if status != 204:
                return shortest
            taken = time.monotonic() - begin
            shortest = taken if shortest is None else min(shortest, taken)
    return shortest


def _received(data: bytes) -> bytes:
    if not data:
        raise RelayError("the relay closed the connection")
    return data
