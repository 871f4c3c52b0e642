"""Heads of requests to a relay and of its answers, in the form of HTTP/1.1; bytes from strangers.

Proxies and firewalls know CONNECT, so a relay speaks as much of HTTP as that needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ravnest.errors import RelayError

LONGEST_HEAD = 24 * 1024
"""Most bytes of a head, with the empty line that ends it."""
PING_PATH = "/ping"

_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) ([\x21-\x7e]{1,400}) HTTP/1\.[01]")
_STATUS_LINE = re.compile(r"HTTP/1\.[01] ([1-9][0-9]{2})(?: ([\x20-\x7e]{0,400}))?")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\t]*?)[ \t]*")
_TICKET_FIELD = "authorization"


class RelayMethod(StrEnum):
    """Requests that a relay answers."""

    CONNECT = "CONNECT"
    """Be connected to an endpoint."""
    REGISTER = "REGISTER"
    """Be reachable as an endpoint; the connection becomes the control connection."""
    ACCEPT = "ACCEPT"
    """Answer a circuit that the control connection announced."""
    GET = "GET"
    """Measure a round trip."""


@dataclass(frozen=True)
class RequestHead:
    """Request to a relay."""

    method: RelayMethod
    target: str
    ticket: str
    """Ticket as sent, not checked; empty if there is none."""


class HeadReader:
    """Collects a head from the pieces in which it arrives."""

    def __init__(self) -> None:
        self._received = bytearray()

    @property
    def room(self) -> int:
        """Bytes to receive at most before the next ``feed``."""
        return LONGEST_HEAD - len(self._received)

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Return the head and the bytes after it once it is complete; ``RelayError`` if it is too long.

        The reader is empty again afterwards.
        """
        searched = max(len(self._received) - len(_END) + 1, 0)
        self._received += data
        end = self._received.find(_END, searched)
        if end < 0:
            if len(self._received) >= LONGEST_HEAD:
                raise RelayError(f"the request has more than {LONGEST_HEAD} bytes before its empty line")
            return None
        head, rest = bytes(self._received[:end]), bytes(self._received[end + len(_END) :])
        self._received.clear()
        return head, rest


def parse_request(head: bytes) -> RequestHead:
    """Return the request of a head without its last empty line; ``RelayError`` if it is none."""
    line, *fields = _lines(head)
    matched = _REQUEST_LINE.fullmatch(line)
    if matched is None:
        raise RelayError("the request line is not that of HTTP/1.1")
    name, target = matched.groups()
    if name not in RelayMethod.__members__:
        raise RelayError(f"a relay has no method {name}")
    tickets = [
        _ticket(value) for field in fields for key, value in [_field(field)] if key == _TICKET_FIELD
    ]
    if len(tickets) > 1:
        raise RelayError("the request has several tickets")
    return RequestHead(RelayMethod(name), target, tickets[0] if tickets else "")


def parse_answer(head: bytes) -> tuple[int, str]:
    """Return status and reason of an answer; ``RelayError`` if the head is none."""
    matched = _STATUS_LINE.fullmatch(_lines(head)[0])
    if matched is None:
        raise RelayError("the answer is not that of a relay")
    return int(matched[1]), matched[2] or ""


def request(method: RelayMethod, target: str, ticket: str = "") -> bytes:
    """Return the head of a request, complete."""
    field = f"Authorization: Bearer {ticket}\r\n" if ticket else ""
    return f"{method} {target} HTTP/1.1\r\nHost: relay\r\n{field}\r\n".encode("ascii")


def answer(status: int, reason: str, *, stays: bool) -> bytes:
    """Return the head of an answer, complete; ``stays`` says that the connection stays open."""
    fields = "" if stays else "Content-Length: 0\r\nConnection: close\r\n"
    return f"HTTP/1.1 {status} {reason}\r\n{fields}\r\n".encode("ascii", "replace")


def _lines(head: bytes) -> list[str]:
    try:
        return head.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise RelayError("the head has bytes that are not ASCII") from None


def _field(line: str) -> tuple[str, str]:
    matched = _FIELD.fullmatch(line)
    if matched is None:
        raise RelayError("a line of the head is no field of HTTP")
    return matched[1].lower(), matched[2]


def _ticket(value: str) -> str:
    scheme, _, rest = value.partition(" ")
    if scheme.lower() != "bearer":
        raise RelayError("a ticket is sent as Bearer authorization")
    return rest.strip()
