"""Connections that TLS rejected: their kinds, and the lines of the log that report them.

The agent of a provider counts the lines of its worker, and the server records the numbers.
"""

from __future__ import annotations

import logging
import re
import ssl
from typing import Literal, TextIO

RejectionKind = Literal["foreign", "bare", "plain"]
"""The fields of ``schemas.providers.TlsRejections``."""

_KINDS: dict[str, RejectionKind] = {
    "CERTIFICATE_VERIFY_FAILED": "foreign",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "bare",
    "WRONG_VERSION_NUMBER": "plain",
    "HTTP_REQUEST": "plain",
    "HTTPS_PROXY_REQUEST": "plain",
}
_REASONS: dict[RejectionKind, str] = {
    "foreign": "its certificate is not one of this plan",
    "bare": "it has no certificate",
    "plain": "it does not use TLS",
}
_LINE = re.compile(rf"rejected a connection from \S{{1,100}}: ({'|'.join(_REASONS.values())})")

logger = logging.getLogger(__name__)


def report_rejection(error: ssl.SSLError, peer: str) -> None:
    """Log that the connection of a machine at the address ``peer`` was rejected, and why."""
    kind = _KINDS.get(error.reason or "")
    if kind is None:
        logger.info("a connection from %s failed: %s", peer, tls_reason(error))
    else:
        logger.warning("rejected a connection from %s: %s", peer, _REASONS[kind])


def write_rejections(stream: TextIO) -> None:
    """Write the lines about rejected connections to a stream too."""
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)


def rejection_kind(line: str) -> RejectionKind | None:
    """Return the kind of connection that a line of the log says was rejected, or None."""
    found = _LINE.fullmatch(line.strip())
    return None if found is None else next(k for k, text in _REASONS.items() if text == found[1])


def tls_reason(error: ssl.SSLError) -> str:
    """Return why a TLS connection failed, for the side that dialled or listens."""
    reason = error.reason or ""
    if "ALERT" in reason:
        return f"the peer rejects this node's certificate ({reason})"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{reason}: {error.verify_message}"
    if _KINDS.get(reason) == "plain":
        return "the process that listens there does not use TLS"
    return reason or str(error)
