"""Filter of system calls: rules per call, compiled to a program that the kernel runs. Pure.

The program is classic BPF, as ``seccomp(2)`` takes it: it sees the number of a call and its arguments,
but no memory. It can therefore not check addresses of sockets; ``socket_broker.py`` does.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ravnest.provider.sandbox.system_calls import Processor

KILL = 0x80000000
REFUSE = 0x00050000
"""Plus an error number."""
ASK = 0x7FC00000
"""The process that holds the listener answers."""
ALLOW = 0x7FFF0000

_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""
_ALL = 0xFFFFFFFF


@dataclass(frozen=True)
class Argument:
    """Condition on an argument: its bits of ``mask`` are one of ``values``."""

    index: int
    values: tuple[int, ...]
    mask: int = _ALL
    upper: bool = False
    """Look at the upper 32 bits, of an argument that is a pointer."""


@dataclass(frozen=True)
class Rule:
    """Action for a call: ``action`` if all conditions hold, otherwise the call fails with ``error``."""

    action: int = ALLOW
    conditions: tuple[Argument, ...] = ()
    error: int = errno.EPERM


@dataclass(frozen=True)
class Instruction:
    """One instruction of classic BPF."""

    code: int
    value: int
    if_true: int = 0
    if_false: int = 0
    """Instructions to skip after a comparison."""


def filter_program(processor: Processor, rules: Mapping[str, Rule]) -> list[Instruction]:
    """Return the program that permits the processor's permitted calls, by their rules if they have any.

    Calls of another architecture end the process: their numbers mean something else.
    """
    program = [
        Instruction(_LOAD, _ARCHITECTURE),
        Instruction(_EQUAL, processor.architecture, if_true=1),
        Instruction(_RETURN, KILL),
        Instruction(_LOAD, _NUMBER),
    ]
    for name, number in processor.permitted.items():
        program += _if_call(number, list(_body(rules.get(name, Rule()))))
    for number in processor.refused.values():
        program += _if_call(number, [Instruction(_RETURN, REFUSE | errno.EPERM)])
    return [*program, Instruction(_RETURN, REFUSE | errno.ENOSYS)]


def _if_call(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    return [Instruction(_EQUAL, number, if_false=len(body)), *body]


def _body(rule: Rule) -> Iterator[Instruction]:
    for condition in rule.conditions:
        yield Instruction(_LOAD, _ARGUMENTS + 8 * condition.index + 4 * condition.upper)
        if condition.mask != _ALL:
            yield Instruction(_AND, condition.mask)
        count = len(condition.values)
        for position, value in enumerate(condition.values):
            yield Instruction(_EQUAL, value, if_true=count - position)
        yield Instruction(_RETURN, REFUSE | rule.error)
    yield Instruction(_RETURN, rule.action)


def encoded(program: Sequence[Instruction]) -> bytes:
    """Return the program as an array of ``struct sock_filter``."""
    return b"".join(
        struct.pack("=HBBI", each.code, each.if_true, each.if_false, each.value) for each in program
    )
