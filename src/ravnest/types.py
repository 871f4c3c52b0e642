"""Small value types that several layers share."""

from __future__ import annotations

import ipaddress
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeVar

import msgspec

Kind = TypeVar("Kind")
DecodeHook = Callable[[type, Any], Any]
"""Function that decodes what msgspec has no type for."""

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_DOTTED_NUMBER = re.compile(r"[0-9.]+")
_BARE_IPV6 = re.compile(r"[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*")


Schedule = Literal["async", "sync"]
"""Rule for the order of computations in a pipeline."""
ScheduleSetting = Schedule | Literal["auto"]
"""Schedule that a user sets; ``auto``: the plan's choice."""
StateForm = Literal["float32", "int8"]
"""Form of an optimizer's state between updates: as the optimizer keeps it, or in 8 bits."""
RobustMean = Literal["trimmed"]
"""Mean that bounds the effect of single clusters."""
ROBUST_CLUSTERS = 3
"""Clusters that a robust mean needs: of two, nobody knows which one is wrong."""


class Role(StrEnum):
    """Role of a node in its cluster, which follows from its position in the pipeline."""

    ROOT = "Root"
    STEM = "Stem"
    LEAF = "Leaf"

    @classmethod
    def at(cls, position: int, count: int) -> Role:
        """Return the role at ``position`` of ``count`` stages; a cluster of one node has only a Root."""
        if position == 0:
            return cls.ROOT
        return cls.LEAF if position == count - 1 else cls.STEM


class MicrobatchId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifier of a micro-batch within a run, used by the schedule and on the wire."""

    phase: int
    """Number of the phase in the run; each epoch, validation and prediction is a phase."""
    index: int
    """Position of the micro-batch in the phase."""

    def __str__(self) -> str:
        return f"micro-batch {self.index} of phase {self.phase}"


class CheckpointId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifier of a checkpoint within a run; a later one is larger."""

    update: int
    """Number of updates that it contains."""
    phase: int
    """Number of phases that are over in it."""

    def __str__(self) -> str:
        return f"update {self.update}"


BEGINNING = CheckpointId(0, 0)
"""State before the first update, which every node has: the weights that its stage was shipped with."""


@dataclass(frozen=True, order=True)
class Address:
    """Network address of a node."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``host:port``; the ``ValueError`` says what the text must be."""
        host, colon, port = text.rpartition(":")
        if not colon or not host:
            raise ValueError(f'must be "host:port", is {_shown(text)}')
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
            raise ValueError(f"must end in a port from 1 to 65535, is {_shown(text)}")
        return cls(_host(host, text), int(port))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the strides visit every element of a block of memory exactly once."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _host(host: str, text: str) -> str:
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        if bracketed:
            return str(ipaddress.IPv6Address(host[1:-1]))
        if _DOTTED_NUMBER.fullmatch(host):
            return str(ipaddress.IPv4Address(host))
    except ipaddress.AddressValueError as error:
        raise ValueError(f"must be a valid IP address, is {_shown(text)}: {error}") from None
    if _BARE_IPV6.fullmatch(host):
        raise ValueError(f'must have an IPv6 host in brackets ("[::1]:8080"), is {_shown(text)}')
    if not _HOST.fullmatch(host):
        raise ValueError(f'must be "host:port" with a host name or an IP, is {_shown(text)}')
    return host.lower()


def _shown(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


_CONVERTING = threading.Lock()


def convert_checked(data: object, kind: type[Kind], dec_hook: DecodeHook | None = None) -> Kind:
    """Return plain data as a value of type ``kind``; ``msgspec.ValidationError`` if it does not fit.

    One thread at a time: msgspec crashes if two threads convert to the same type for the first time.
    """
    with _CONVERTING:
        return msgspec.convert(data, kind, dec_hook=dec_hook)
