"""Proofs that both sides of a link know the secret of their job, for connections without TLS.

Only processes of this machine reach a loopback address, but also those of other users. The secret itself
is never sent: each side answers the random text of the other with an HMAC.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

Side = Literal["dialer", "listener"]

SECRET_BYTES = 32
LONGEST_NONCE = 128


def new_secret() -> str:
    """Return a random secret, in hexadecimal digits."""
    return secrets.token_hex(SECRET_BYTES)


def new_nonce() -> str:
    """Return a random text that is used once."""
    return secrets.token_hex(SECRET_BYTES)


def proof(secret: str, side: Side, nonces: tuple[str, str], hello: bytes) -> str:
    """Return the proof of one side; ``nonces`` are those of the dialer and the listener.

    ``hello`` is the frame of the side that proves: nobody can use the proof for another Hello. The side
    is part of the proof, so that it cannot be sent back to the one who made it.
    """
    parts = (side.encode(), *(nonce.encode() for nonce in nonces), hello)
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def is_proof(found: str, secret: str, side: Side, nonces: tuple[str, str], hello: bytes) -> bool:
    """Return whether a side has proved the secret; takes the same time for each wrong proof."""
    expected = proof(secret, side, nonces, hello)
    return hmac.compare_digest(found.encode(), expected.encode())
