"""Connections that TLS did not let through, as far as gRPC tells of them.

gRPC ends such a handshake before any code of ours hears of it; all there is is a line that it writes
on stderr. The worker's gRPC is told to write it (``limits.environment``), and the agent reads it.
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["foreign", "bare", "plain"]
"""The fields of ``api.providers.Strangers``."""

_LOGGED = re.compile(r"[IW]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] ")
"""How gRPC begins a line that is no error."""
_FAILED = "Handshake failed with error"
_KINDS: dict[str, Kind] = {
    "CERTIFICATE_VERIFY_FAILED": "foreign",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "bare",
    "WRONG_VERSION_NUMBER": "plain",
    "HTTP_REQUEST": "plain",
}


def is_logged(line: str) -> bool:
    """Whether this is a line of gRPC's, and tells no error of this process."""
    return _LOGGED.match(line) is not None


def kind_of(line: str) -> Kind | None:
    """Who was refused, if this line of gRPC's is about that."""
    if _FAILED not in line:
        return None
    return next((kind for name, kind in _KINDS.items() if name in line), None)
