"""Connections that TLS rejected, read from the log of gRPC.

gRPC ends such a handshake before any callback runs; the only trace is a line on stderr. The worker's
gRPC is configured to write it (``limits.environment``), and the agent reads it.
"""

from __future__ import annotations

import re
from typing import Literal

RejectionKind = Literal["foreign", "bare", "plain"]
"""The fields of ``schemas.providers.TlsRejections``."""

_LOG_LINE = re.compile(r"[IW]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] ")
"""Start of a line of gRPC's log that is not an error."""
_FAILED = "Handshake failed with error"
_KINDS: dict[str, RejectionKind] = {
    "CERTIFICATE_VERIFY_FAILED": "foreign",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "bare",
    "WRONG_VERSION_NUMBER": "plain",
    "HTTP_REQUEST": "plain",
}


def is_log_line(line: str) -> bool:
    """Return ``True`` for a line of gRPC's log that is not an error."""
    return _LOG_LINE.match(line) is not None


def rejection_kind(line: str) -> RejectionKind | None:
    """Return the kind of connection that a line says was rejected, or ``None``."""
    if _FAILED not in line:
        return None
    return next((kind for name, kind in _KINDS.items() if name in line), None)
