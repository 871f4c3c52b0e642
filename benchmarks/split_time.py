"""Measure the time and the memory that splitting takes.

Each model is split in its own process. The time includes capturing both modes, measuring, cutting and,
where stated, the check against the unsplit model. Memory is the growth of the peak resident set after
the model is built, while it is split (without and with the check) and written to disk; beyond the model,
relative to its parameters. Run as a script it prints its report.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

from subjects import Subject, bert, mlp, resnet

from ravnest.split import split
from ravnest.store.bundle import save_stage

STAGES = 3
SUBJECTS = (
    Subject("ResNet-50, batch 8 at 224 px", partial(resnet, 50, 8, 224)),
    Subject("BERT-base, batch 8 x 128", partial(bert, 8, 128, base=True)),
    Subject("MLP of 404 MB, batch 4", partial(mlp, 4, 5020)),
)
SECONDS = {SUBJECTS[0].name: 20, SUBJECTS[1].name: 60}


def measure() -> str:
    """Return the report in Markdown."""
    rows = [
        "| model | parameters | split | with check | limit | memory beyond the model | with check |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for subject in SUBJECTS:
        found = [_measure_in_process(subject.name, check) for check in ("without", "with")]
        limit = SECONDS.get(subject.name)
        rows.append(
            f"| {subject.name} | {found[0]['parameters'] / 1e6:.0f} MB | {found[0]['seconds']:.1f} s "
            f"| {found[1]['seconds']:.1f} s | {f'{limit} s' if limit else ''} "
            + "".join(f"| {each['memory'] / each['parameters']:.2f}x " for each in found)
            + "|"
        )
    return "\n".join(rows)


def _measure_in_process(name: str, check: str) -> dict[str, float]:
    command = [sys.executable, __file__, name, check]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    return json.loads(done.stdout.splitlines()[-1])


def _worker(name: str, check: str) -> None:
    warnings.simplefilter("ignore")
    subject = next(subject for subject in SUBJECTS if subject.name == name)
    model, args, kwargs = subject.make()
    before = _peak()
    started = time.perf_counter()
    result = split(model, args, kwargs, stages=STAGES, check=check == "with")
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        for stage in result.stages:
            save_stage(Path(folder) / str(stage.spec.index), stage)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    found = {"seconds": seconds, "memory": _peak() - before, "parameters": parameters}
    print(json.dumps(found))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _worker(*sys.argv[1:])
    else:
        print(measure())
