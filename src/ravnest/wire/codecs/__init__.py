"""Codecs: encodings of tensors as payload bytes; see ``docs/compression.md``."""

from __future__ import annotations

from ravnest.errors import WireError
from ravnest.wire.codecs.base import RAW, Codec, Encoded
from ravnest.wire.codecs.feedback import ErrorFeedback
from ravnest.wire.codecs.halves import BF16, FP16
from ravnest.wire.codecs.int8 import INT8

__all__ = ["BF16", "CODECS", "FP16", "INT8", "RAW", "Codec", "Encoded", "ErrorFeedback", "codec_named"]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (RAW, FP16, BF16, INT8)}


def codec_named(name: str) -> Codec:
    """Return the codec with a name; raises ``WireError`` if this node does not know it."""
    codec = CODECS.get(name)
    if codec is None:
        raise WireError(f"unknown codec {name!r}; this node knows {', '.join(sorted(CODECS))}")
    return codec
