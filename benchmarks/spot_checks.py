"""Measure what a spot check costs.

The first of two stages of a language model is checked. "Node" is the processor time that its node and
its provider need for one check: writing input and weights, and hashing the file. The receiver writes
only the activations. The upload is counted with the size of the files and the stated bandwidth.
"Interval" is the mean time between two checks of the stage, as the server chooses it: 30 minutes, or
more if 1% is exceeded. "Of time" is the node's processor time in terms of one core during the interval;
for comparison, the processor time of one micro-batch of training, forward and backward. "Server" is the
processor time of the process that computes the output again; most of it is the import of torch. Run as
a script it prints its report.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from workloads import GPT

from ravnest.deadlines import SPOT_CHECKS
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.server.scheduling.check_process import SandboxedChecker
from ravnest.server.scheduling.check_program import CheckRequest
from ravnest.server.scheduling.spot_checks import least_interval
from ravnest.split import split
from ravnest.split.module import StageModule
from ravnest.store.bundle import STAGE_FILE, save_stage
from ravnest.store.files import sha256_of
from ravnest.store.forward_evidence import ForwardEvidence, own_arithmetic, write_evidence
from ravnest.types import MicrobatchId

BATCH, LENGTH, VOCABULARY = 4, 128, 1000
WIDTHS = ((128, 4), (512, 8), (1024, 12))
"""Width and number of layers of the models."""
BANDWIDTHS = (100.0, 1000.0)
REPEATS = 5


def measure() -> str:
    """Return the report in Markdown."""
    head = ["weights", "micro-batch", "node", "receiver", "server"]
    for bandwidth in BANDWIDTHS:
        head += [f"interval at {bandwidth:g} Mbit/s", "of time", "of bandwidth"]
    rows = [f"| {' | '.join(head)} |", "|" + "--:|" * len(head)]
    rows += [_row(*each) for each in WIDTHS]
    return "\n".join(rows)


def _row(width: int, layers: int) -> str:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    model = GPT(VOCABULARY, width, layers, LENGTH)
    stage = split(model, tokens, stages=2, check=False).stages[0]
    with tempfile.TemporaryDirectory(prefix="ravnest-") as name:
        folder = Path(name)
        save_stage(folder, stage)
        module = StageModule(stage.spec, {key: t.clone() for key, t in stage.tensors.items()})
        rule = UpdateRule(torch.optim.AdamW, {"lr": 1e-3})
        execution = StageExecution(module, rule, seed=0, stash=False)
        (given,) = [value.name for value in module.graph.inputs]
        microbatch = MicrobatchId(0, 0)

        def train() -> None:
            sent, _ = execution.forward(microbatch, 0, {given: tokens})
            execution.backward(microbatch, {key: torch.ones_like(t) for key, t in sent.items()})

        training = _seconds(train)
        outputs, _ = execution.forward(microbatch, 0, {given: tokens})
        stated, received = folder / "stated", folder / "received"

        def answer() -> None:
            found = execution.computed_from(microbatch)
            assert found is not None
            write_evidence(stated, ForwardEvidence(*found, own_arithmetic()))
            sha256_of(stated)

        def keep() -> None:
            write_evidence(received, ForwardEvidence(outputs, {}))
            sha256_of(received)

        node, receiver = _seconds(answer), _seconds(keep)
        request = CheckRequest(
            *(str(each) for each in (folder / STAGE_FILE, stated, received)),
            seed=0,
            phase=0,
            index=0,
            codec="raw",
            memory=3 << 30,
        )
        server = _server_seconds(request)
        size = stated.stat().st_size + received.stat().st_size
    cells = [f"{size / 1e6:.0f} MB", *(f"{each:.2f} s" for each in (training, node, receiver, server))]
    for bandwidth in BANDWIDTHS:
        interval = max(SPOT_CHECKS, least_interval(size, bandwidth))
        upload = size * 8 / (bandwidth * 1e6)
        cells += [f"{interval / 60:.0f} min", f"{node / interval:.3%}", f"{upload / interval:.2%}"]
    return f"| {' | '.join(cells)} |"


def _seconds(work: Callable[[], None]) -> float:
    """Return the median processor time of a call."""
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return sorted(found)[REPEATS // 2]


def _server_seconds(request: CheckRequest) -> float:
    checker = SandboxedChecker(600.0)
    assert checker.is_available, "this machine has no sandbox"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = checker.check(request)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.compared, result
    assert not result.differs, result
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    print(measure())
