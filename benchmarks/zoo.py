"""Split every model of the zoo into 2, 3 and 4 stages and check each for exactness.

    python benchmarks/zoo.py                          all models; writes docs/zoo.md
    python benchmarks/zoo.py --minutes 15             start no model after 15 minutes; best known first
    python benchmarks/zoo.py --only gpt2,t5           some models; writes nothing
    python benchmarks/zoo.py --stages 3               one number of stages; writes nothing

The stages are written to disk, read back and compared with the unsplit model: two steps of SGD with
momentum, evaluation, and both modes on a smaller batch, with the same seeds. Outputs, losses, gradients
and the fused state must be equal. Each model runs in its own process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version

from zoo_models import ZOO, ZooModel, find
from zoo_models.examination import BITWISE, ROOT, Finding, examine, plain

REPORT = ROOT / "docs" / "zoo.md"
STAGES = (2, 3, 4)
UNLIMITED = float("inf")
TIMEOUT = 900
"""Seconds after which a model counts as failed."""
FIRST = [
    "torchvision-resnet50",
    "torchvision-inception-v3",
    "timm-inception-v3",
    "torchvision-densenet121",
    "torchvision-efficientnet-b0",
    "torchvision-mobilenet-v3-small",
    "timm-convnext-atto",
    "torchvision-vit",
    "timm-vit-tiny-patch16-224",
    "torchvision-swin",
    "bert-pretraining",
    "bert-classifier",
    "gpt2",
    "llama",
    "llama-padded",
    "gemma",
    "gemma2",
    "qwen2",
    "qwen3",
    "t5",
    "distilbert",
    "data-dependent-branch",
    "custom-autograd-function",
    "detr",
    "lstm-tagger",
    "unet",
    "tied-gpt",
    "scripted-resnet18",
    "scripted-control-flow",
    "traced-resnet18",
    "albert",
    "roberta",
    "bart",
    "whisper",
    "mistral",
    "phi",
    "opt",
]
"""Models that run first, so that a limited run covers the best known. Some must be rejected."""


def main() -> int:
    """Run the models; return 1 if a result is not the one that the registry expects."""
    options = _options()
    if options.worker:
        return work(options.worker, options.stages)
    models = [find(name) for name in options.only] or in_order()
    started = time.monotonic()
    findings: list[Finding] = []

    def run(model: ZooModel) -> Finding | None:
        late = time.monotonic() - started > 60 * options.minutes
        return None if late else run_worker(model, options.stages)

    with ThreadPoolExecutor(options.jobs) as pool:
        for finding in pool.map(run, models):
            if finding is not None:
                findings.append(finding)
                print(f"[{len(findings)}/{len(models)}] {describe(finding)}", flush=True)
    minutes = (time.monotonic() - started) / 60
    if not options.only and tuple(options.stages) == STAGES:
        REPORT.write_text(render(findings, minutes, options.minutes), encoding="utf-8")
    wrong = [finding.name for finding in findings if not finding.ok]
    print(f"{len(findings) - len(wrong)} of {len(findings)} as expected in {minutes:.0f} minutes")
    print(f"not as expected: {','.join(wrong)}" if wrong else "all results as expected")
    return 1 if wrong else 0


def in_order() -> list[ZooModel]:
    """Return all models: the best known first, then the others, alternating between sources."""
    rest = [model for model in ZOO if model.name not in FIRST]
    turn = {
        id(model): index
        for source in _sources()
        for index, model in enumerate(_from_source(rest, source))
    }
    return [*(find(name) for name in FIRST), *sorted(rest, key=lambda model: turn[id(model)])]


def _sources() -> list[str]:
    return sorted({model.source for model in ZOO})


def _from_source(models: Sequence[ZooModel], source: str) -> list[ZooModel]:
    return [model for model in models if model.source == source]


def work(name: str, stages: Sequence[int]) -> int:
    """Examine one model in this process; print its result as the last line."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(json.dumps(asdict(examine(find(name), stages))))
    return 0


def run_worker(model: ZooModel, stages: Sequence[int]) -> Finding:
    """Examine one model in its own process, which isolates crashes and leaks."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # several models run in parallel
        "HF_HUB_OFFLINE": "1",  # never download; fail instead of waiting
    }
    numbers = ",".join(map(str, stages))
    command = [sys.executable, __file__, "--worker", model.name, "--stages", numbers]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=TIMEOUT,
            check=True,
        )
        return Finding(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        note = f"no result within {TIMEOUT} s"
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        note = f"exit {error.returncode}: {plain(last)}"
    return Finding(model.name, model.source, notes=[note])


def render(findings: Sequence[Finding], minutes: float, limit: float = UNLIMITED) -> str:
    """Return the page docs/zoo.md for a run of ``minutes`` that started no model after ``limit``."""
    refused = [f for f in findings if f.refusal is not None]
    split = [f for f in findings if f.refusal is None]
    cells = [cell for f in split for cell in f.cells.values()]
    wrong = [f for f in findings if not f.ok]
    lines = [
        "# The zoo",
        "",
        f"{len(split)} models, each split into {', '.join(map(str, STAGES[:-1]))} and {STAGES[-1]} "
        f"stages: {cells.count(BITWISE)} of {len(STAGES) * len(split)} splits are bitwise equal to the "
        f"unsplit model. {len(refused)} more models cannot be captured and are rejected with a reason."
        f"{_left_out(len(findings))}",
        "",
        f"Reproduce it with {_command(limit, minutes)}. "
        f"Last run: {datetime.now(UTC):%Y-%m-%d}, {_versions()}.",
        "",
        "The stages are written to disk, read back and compared with the model: outputs, loss and all "
        "gradients of two training steps with SGD and momentum; outputs in evaluation; both again on a "
        "smaller batch; the fused `state_dict`, which the model must load with `strict=True`. All "
        "models have random weights and small sizes; batch sizes 4 and 2, CPU, one thread, the same "
        "seeds on both sides, torch's attention fast path off.",
        "",
        "Seconds are CPU time of one split: capture in both modes, measuring, cutting and self-check.",
        "",
        f"| model | from | parameters | operations | {' | '.join(map(str, STAGES))} | seconds |",
        f"|---|---|--:|--:|{'---|' * len(STAGES)}--:|",
        *(_row(finding) for finding in split),
        "",
        "## Rejected models and their messages",
        "",
        "| model | from | message |",
        "|---|---|---|",
        *(f"| {f.name} | {f.source} | {_cell(f.refusal or '')} |" for f in refused),
        "",
    ]
    if wrong:
        lines += ["## Not as expected", "", *(f"- {describe(f)}" for f in wrong), ""]
    return "\n".join(lines)


def _command(limit: float, minutes: float) -> str:
    took = f"{minutes:.0f} minutes on {os.cpu_count()} cores"
    if limit == UNLIMITED:
        return f"`make zoo` ({took})"
    return f'`make zoo ARGS="--minutes {limit:g}"` ({took}; `make zoo` runs all models)'


def _left_out(count: int) -> str:
    left = len(ZOO) - count
    return (
        f" The run was limited in time: {left} of the zoo's {len(ZOO)} models are missing."
        if left
        else ""
    )


def describe(finding: Finding) -> str:
    """Return one line about one model."""
    parts = [f"{count}: {cell}" for count, cell in finding.cells.items()]
    if set(finding.cells.values()) == {BITWISE}:
        parts = [f"{BITWISE} in {', '.join(finding.cells)}"]
    if finding.refusal is not None:
        parts.append(f"rejected: {finding.refusal}")
    parts += [*finding.notes, f"{finding.seconds:.1f} s"]
    return f"{'ok  ' if finding.ok else 'FAIL'} {finding.name}: {'; '.join(parts)}"


def _row(finding: Finding) -> str:
    results = [_cell(finding.cells.get(str(count), "-")) for count in STAGES]
    name = finding.name + "".join(f" ({note})" for note in finding.notes if finding.ok)
    return (
        f"| {name} | {finding.source} | {finding.parameters:,} | {finding.operations:,} | "
        f"{' | '.join(results)} | {finding.seconds:.1f} |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _versions() -> str:
    names = ("torch", "torchvision", "timm", "transformers")
    return ", ".join(f"{name} {version(name)}" for name in names)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=_names, default=[], help="names of models, separated by commas")
    parser.add_argument(
        "--stages", type=_numbers, default=list(STAGES), help="numbers of stages, separated by commas"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of models to run in parallel"
    )
    parser.add_argument(
        "--minutes", type=float, default=UNLIMITED, help="start no model after this many minutes"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in _names(text)]


if __name__ == "__main__":
    sys.exit(main())
