"""Relay as a program of its own: configuration and updates as JSON lines on stdin, its port on stdout.

The first line is a ``RelayConfig``, each further line a ``RelayUpdate``. The program writes one line, a
``RelayReady`` or a ``RelayFailed``, and runs until stdin ends. ``RelayProcess`` is the other side.
"""

from __future__ import annotations

import logging
import sys
from typing import BinaryIO

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ravnest.errors import TransportError
from ravnest.host import raise_file_limit
from ravnest.relay.limits import RelayLimits
from ravnest.relay.service import Relay
from ravnest.types import Address, convert_checked

logger = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 20


class RelayUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs that run now; ``None`` serves every job with a valid ticket."""

    jobs: list[str] | None


class RelayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a relay's process."""

    host: str
    port: int
    key: bytes
    """Public key that verifies tickets, 32 bytes."""
    limits: RelayLimits
    jobs: list[str] | None


class RelayReady(msgspec.Struct, frozen=True, tag="ready"):
    """The relay listens."""

    port: int


class RelayFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The relay cannot listen."""

    reason: str


def run(stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Run a relay until ``stdin`` ends; return the exit code."""
    config = convert_checked(msgspec.json.decode(stdin.readline(_LONGEST_LINE)), RelayConfig)
    files = raise_file_limit()
    if files is not None and files < config.limits.connections:
        logger.warning(
            "the system allows %d open files, fewer than the relay's %d connections: raise `ulimit -n`",
            files,
            config.limits.connections,
        )
    key = Ed25519PublicKey.from_public_bytes(config.key)
    relay = Relay(Address(config.host, config.port), key, config.limits)
    relay.set_running_jobs(_jobs(config.jobs))
    try:
        relay.start()
    except TransportError as error:
        _write(stdout, RelayFailed(str(error)))
        return 1
    _write(stdout, RelayReady(relay.address.port))
    while line := stdin.readline(_LONGEST_LINE):
        update = convert_checked(msgspec.json.decode(line), RelayUpdate)
        relay.set_running_jobs(_jobs(update.jobs))
    relay.close()
    return 0


def _jobs(jobs: list[str] | None) -> frozenset[str] | None:
    return None if jobs is None else frozenset(jobs)


def _write(stdout: BinaryIO, message: msgspec.Struct) -> None:
    stdout.write(msgspec.json.encode(message) + b"\n")
    stdout.flush()


def main() -> None:
    """Run a relay with the streams of this process."""
    logging.basicConfig(level=logging.WARNING)
    sys.exit(run(sys.stdin.buffer, sys.stdout.buffer))
