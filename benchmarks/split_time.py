"""Measure the time and the memory that splitting takes.

Each model is split in its own process. The time includes capturing both modes, measuring, cutting and,
where stated, the self-check, the comparison with the unsplit model. Memory is the growth of the peak
resident set after the model is built, relative to its parameters: while it is split (without and with
the self-check) and written to disk, and in a call of `clusterize` for three nodes, which also profiles
the model, plans, and compares a batch with its parts. Run as a script it prints its report; the
beginnings of names as arguments select models.
"""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from subjects import Example, Subject, bert, mlp, resnet

from ravnest import clusterize
from ravnest.split import split
from ravnest.store.bundle import save_stage

STAGES = 3
WORKER = "--worker"
SUBJECTS = (
    Subject("ResNet-50, batch 8 at 224 px", partial(resnet, 50, 8, 224)),
    Subject("BERT-base, batch 8 x 128", partial(bert, 8, 128, base=True)),
    Subject("MLP of 404 MB, batch 4", partial(mlp, 4, 5020)),
)
SECONDS = {SUBJECTS[0].name: 20, SUBJECTS[1].name: 60}


WAYS = ("split", "split with self-check", "clusterize")


def measure(selected: tuple[str, ...] = ()) -> str:
    """Return the report in Markdown; ``selected`` has beginnings of names."""
    rows = [
        "| model | parameters | split | with self-check | limit | peak memory / parameters "
        "| peak memory with self-check / parameters | of `clusterize` |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for subject in SUBJECTS:
        if selected and not subject.name.startswith(selected):
            continue
        found = [_measure_in_process(subject.name, way) for way in WAYS]
        limit = SECONDS.get(subject.name)
        rows.append(
            f"| {subject.name} | {found[0]['parameters'] / 1e6:.0f} MB | {found[0]['seconds']:.1f} s "
            f"| {found[1]['seconds']:.1f} s | {f'{limit} s' if limit else ''} "
            + "".join(f"| {each['memory'] / each['parameters']:.2f}x " for each in found)
            + "|"
        )
    return "\n".join(rows)


def _measure_in_process(name: str, way: str) -> dict[str, float]:
    command = [sys.executable, __file__, WORKER, name, way]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    return json.loads(done.stdout.splitlines()[-1])


def _worker(name: str, way: str) -> None:
    warnings.simplefilter("ignore")
    subject = next(subject for subject in SUBJECTS if subject.name == name)
    example = subject.make()
    before = _peak()
    with tempfile.TemporaryDirectory() as folder:
        if way == "clusterize":
            seconds = _clusterize(example, Path(folder))
        else:
            seconds = _split(example, Path(folder), check=way != "split")
    parameters = sum(p.numel() * p.element_size() for p in example[0].parameters())
    found = {"seconds": seconds, "memory": _peak() - before, "parameters": parameters}
    print(json.dumps(found))


def _split(example: Example, folder: Path, *, check: bool) -> float:
    """Split and write the stages; return the seconds of the former."""
    model, args, kwargs = example
    started = time.perf_counter()
    result = split(model, args, kwargs, stages=STAGES, check=check)
    seconds = time.perf_counter() - started
    for stage in result.stages:
        save_stage(folder / str(stage.spec.index), stage)
    return seconds


def _clusterize(example: Example, folder: Path) -> float:
    """Call ``clusterize``; return the seconds it takes."""
    model, args, kwargs = example
    nodes = {
        str(number): {"IP": f"127.0.0.1:{20_000 + number}", "benchmarks": {"ram": 16, "bandwidth": 100}}
        for number in range(STAGES)
    }
    (folder / "node_configs.json").write_text(json.dumps(nodes), encoding="utf-8")
    started = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        clusterize(model, args, kwargs, clusters=1, folder=folder)
    return time.perf_counter() - started


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    match sys.argv[1:]:
        case [first, name, way] if first == WORKER:
            _worker(name, way)
        case selected:
            print(measure(tuple(selected)))
