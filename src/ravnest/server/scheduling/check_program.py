"""Program that computes the output of a stage again; ``check_process.py`` starts it in a sandbox."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import psutil
import torch

from ravnest import host
from ravnest.errors import RavnestError, StageFormatError
from ravnest.runtime.machine_failures import is_out_of_memory
from ravnest.runtime.stage.forward_check import CheckResult, check_forward
from ravnest.split.encoding import stage_from_json
from ravnest.split.limits import MAX_STAGE_BYTES
from ravnest.store.files import read_json
from ravnest.store.forward_evidence import read_evidence
from ravnest.types import MicrobatchId

_LONGEST_DETAIL = 1000


class CheckRequest(msgspec.Struct, frozen=True):
    """Files and settings of one check."""

    stage: str
    """Path of the stage's graph, as it was shipped."""
    stated: str
    received: str
    """Paths of the files of both sides."""
    seed: int
    phase: int
    index: int
    codec: str
    memory: int
    """Bytes that the computation may take."""


def main(request: str) -> None:
    """Carry out a request and write the result to stdout, both as JSON."""
    torch.set_num_threads(1)
    found = msgspec.json.decode(request, type=CheckRequest)
    host.limit_data_memory(host.data_memory(psutil.Process()) + found.memory)
    result = msgspec.structs.asdict(_Reply.of(checked(found)))
    sys.stdout.write(msgspec.json.encode(result).decode())
    sys.stdout.flush()


class _Reply(msgspec.Struct, frozen=True):
    deviation: float | None
    """``None``: nothing fits; JSON has no infinity."""
    detail: str
    compared: bool

    @classmethod
    def of(cls, result: CheckResult) -> _Reply:
        finite = abs(result.deviation) < float("inf")
        return cls(
            result.deviation if finite else None, result.detail[:_LONGEST_DETAIL], result.compared
        )


def read_reply(reply: bytes) -> CheckResult:
    """Return the result that the program has written; ``ValueError`` if it is none."""
    found = msgspec.json.decode(reply, type=_Reply)
    deviation = float("inf") if found.deviation is None else found.deviation
    return CheckResult(deviation, found.detail, found.compared)


def checked(request: CheckRequest) -> CheckResult:
    """Read the files of a request, compute the output and compare it."""
    try:
        spec = stage_from_json(read_json(Path(request.stage), MAX_STAGE_BYTES))
    except RavnestError as error:
        return CheckResult(detail=f"the stage cannot be read: {error}", compared=False)
    try:
        stated = read_evidence(Path(request.stated))
    except StageFormatError as error:
        return CheckResult(float("inf"), f"what it stated cannot be read: {error}")
    try:
        received = read_evidence(Path(request.received))
    except StageFormatError as error:
        return CheckResult(detail=f"the output of the next node cannot be read: {error}", compared=False)
    try:
        return check_forward(
            spec,
            stated,
            received,
            seed=request.seed,
            microbatch=MicrobatchId(request.phase, request.index),
            codec=request.codec,
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        limit = f"{request.memory / 1e9:.1f} GB"
        return CheckResult(detail=f"it takes more than {limit} of the server's memory", compared=False)
