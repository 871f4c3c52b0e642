"""Call every operator that a stage may use with hostile arguments, in child processes.

    python tests/fuzz/fuzz_operators.py --calls 1000000          a long run
    python tests/fuzz/fuzz_operators.py --seed 3 --only 12345    one call again, in this process

A finding is a call that ended its process by a signal, took too long, or read or wrote memory outside
of its tensors. Each call is determined by the seed and its number.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from call_plans import plan_call
from canaries import OUT_OF_MEMORY, check_call

from ravnest.split.operator_guards import executable
from ravnest.split.operators import all_targets, resolve

CALL_SECONDS = 10.0
"""Processor time after which a call counts as endless."""
WAITING_SECONDS = 600.0
"""Time after which a call counts as endless that uses no processor."""
MEMORY = 512 << 20
"""Bytes that a child may allocate; a call that wants more gets an error, as in a worker."""
MORE_MEMORY = 1 << 30
"""The same for a call that is made again, because only one of its two results had enough memory."""
CHILD_CALLS = 20_000
"""Calls of one child: a later one begins with fresh memory, whatever earlier ones have leaked."""
ENDED_EARLY = 120
"""Findings after which a run ends: the list is plainly wrong."""


@dataclass
class Report:
    """Result of a run."""

    calls: int = 0
    seconds: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    succeeded: Counter[str] = field(default_factory=Counter)
    """Calls that returned a value, by operator."""

    def add(self, other: Report) -> None:
        """Add the result of another run."""
        self.calls += other.calls
        self.seconds += other.seconds
        self.findings += other.findings
        self.outcomes += other.outcomes
        self.succeeded += other.succeeded


class Fuzzer:
    """Runs calls in child processes and attributes what ends them."""

    def __init__(self, seed: int, targets: list[str], deadline: float = math.inf) -> None:
        self._seed = seed
        self._targets = targets
        self._deadline = deadline
        """Time on the monotonic clock at which a run ends early."""
        self._place = mmap.mmap(-1, 8)
        """Number of the call that the child is making."""

    def run(self, first: int, stop: int) -> Report:
        """Make the calls ``first`` to ``stop - 1``."""
        started, report, begin = time.monotonic(), Report(), first
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder, "findings")
            lines.touch()
            while first < stop and not self._is_over(report):
                first = self._run_child(first, min(first + CHILD_CALLS, stop), lines, report)
            report.calls = first - begin
            for line in lines.read_text().splitlines():
                self._read(json.loads(line), report)
        report.seconds = time.monotonic() - started
        return report

    def _is_over(self, report: Report) -> bool:
        return time.monotonic() >= self._deadline or len(report.findings) >= ENDED_EARLY

    def _read(self, entry: dict[str, Any], report: Report) -> None:
        if "finding" in entry:
            report.findings.append(entry)
        report.outcomes.update(entry.get("outcomes", {}))
        report.succeeded.update(entry.get("succeeded", {}))

    def _run_child(self, first: int, stop: int, lines: Path, report: Report) -> int:
        """Make calls in a child until it ends; return the number of the next call."""
        struct.pack_into("<q", self._place, 0, first)
        child = os.fork()
        if child == 0:
            try:
                self._work(first, stop, lines)
            finally:
                os._exit(0)
        number, since, used = first, time.monotonic(), 0.0
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            (now,) = struct.unpack_from("<q", self._place, 0)
            if done:
                number = now
                break
            if now != number:
                number, since, used = now, time.monotonic(), _processor_seconds(child)
            if self._is_over(report):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return now
            late = time.monotonic() - since > WAITING_SECONDS
            if late or _processor_seconds(child) - used > CALL_SECONDS:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self._add(report, number, f"took more than {CALL_SECONDS:.0f} s")
                return number + 1
            time.sleep(0.1)
        if os.WIFSIGNALED(status):
            self._add(report, number, f"ended the process: {signal.Signals(os.WTERMSIG(status)).name}")
            return number + 1
        return stop

    def _add(self, report: Report, number: int, finding: str) -> None:
        print(f"{number:>8} {self._target(number)}: {finding}", flush=True)
        report.findings.append({"number": number, "target": self._target(number), "finding": finding})

    def _target(self, number: int) -> str:
        return self._targets[number % len(self._targets)]

    def _work(self, first: int, stop: int, lines: Path) -> None:
        warnings.simplefilter("ignore")
        _limit_memory()
        shown = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # libraries of linear algebra print
        os.dup2(null, 2)
        outcomes: Counter[str] = Counter()
        succeeded: Counter[str] = Counter()
        with lines.open("a") as file:
            for number in range(first, stop):
                struct.pack_into("<q", self._place, 0, number)
                target = self._target(number)
                found, outcome = self.call(number)
                outcomes[outcome] += 1
                succeeded[target] += outcome == "value"
                if found:
                    os.write(shown, f"{number:>8} {target}: {found}\n".encode())
                    file.write(json.dumps({"number": number, "target": target, "finding": found}) + "\n")
                    file.flush()
                if number % 100 == 99:
                    file.write(json.dumps({"outcomes": outcomes, "succeeded": succeeded}) + "\n")
                    file.flush()
                    outcomes.clear()
                    succeeded.clear()
            file.write(json.dumps({"outcomes": outcomes, "succeeded": succeeded}) + "\n")

    def call(self, number: int) -> tuple[str, str]:
        """Make one call in this process; return what is wrong with it, and its outcome."""
        target = self._target(number)
        plan = plan_call(target, resolve(target), self._seed, number)
        found, outcome = check_call(_executable(target), plan)
        if found and OUT_OF_MEMORY in found:
            with _more_memory():
                return check_call(_executable(target), plan)
        return found, outcome

    def describe(self, number: int) -> str:
        """Return a call as text."""
        target = self._target(number)
        return repr(plan_call(target, resolve(target), self._seed, number))


@cache
def _executable(target: str) -> Callable[..., Any]:
    return executable(target, "fuzzed")


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    (used,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MORE_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _more_memory() -> Iterator[None]:
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def main() -> int:
    """Run the fuzzer; return 1 if it found something."""
    options = _options()
    torch.set_num_threads(1)
    targets = [name for name in all_targets() if options.match in name]
    if options.only is not None:
        fuzzer = Fuzzer(options.seed[0], targets)
        print(fuzzer.describe(options.only), flush=True)
        print(fuzzer.call(options.only))
        return 0
    total, started = Report(), time.monotonic()
    deadline = started + 60 * options.minutes
    share = math.ceil(options.calls / len(options.seed) / options.processes)
    parts = [
        (seed, targets, deadline, options.first + share * part, share)
        for seed in options.seed
        for part in range(options.processes)
    ]
    with ExitStack() as stack:
        run = map
        if options.processes > 1:
            workers = ProcessPoolExecutor(options.processes, get_context("spawn"))
            run = stack.enter_context(workers).map
        for report in run(_run_part, *zip(*parts, strict=True)):
            total.add(report)
    total.seconds = time.monotonic() - started
    never = sorted(set(targets) - {name for name, count in total.succeeded.items() if count})
    print(
        f"{total.calls} calls of {len(targets)} operators with seed {', '.join(map(str, options.seed))} "
        f"in {total.seconds:.0f} s: {total.outcomes['value']} returned a value, "
        f"{len(total.findings)} findings; {len(never)} operators never returned a value"
    )
    if options.json:
        result = {"findings": total.findings, "outcomes": total.outcomes, "never": never}
        options.json.write_text(json.dumps({"calls": total.calls, "operators": len(targets), **result}))
    return 1 if total.findings else 0


def _run_part(seed: int, targets: list[str], deadline: float, first: int, count: int) -> Report:
    """Make a part of the calls, in a process that forks children."""
    torch.set_num_threads(1)
    return Fuzzer(seed, targets, deadline).run(first, first + count)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end earlier after this time")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="the calls are divided among them"
    )
    parser.add_argument("--processes", type=int, default=1, help="processes that share the calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--only", type=int, help="make one call in this process and show it")
    parser.add_argument("--match", default="", help="only operators with this text in their name")
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
