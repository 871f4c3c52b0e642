"""Time of an all-reduce in a ring, compared with gloo and hivemind.

All members are processes on loopback with one torch thread each. A time lasts from the start signal to
the answer of the last member, and the implementations take turns. Ravnest's all-reduce uses links on
loopback, with frames, checksums, weights and a digest of the result; gloo's only sums. Hivemind has
formed its group before the clock starts. Run as a script to print the report.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ravnest.averaging.allreduce import AllReduce, AllReduceResult, RingPart
from ravnest.averaging.ring import PIECE_BYTES
from ravnest.averaging.sinks import Sink
from ravnest.transport.base import Link
from ravnest.transport.socket_transport import SocketTransport
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Hello, Message, RoundId

ELEMENTS = 16 << 20
MEMBERS = 4
ROUNDS = 9
GROWTH = (2, 4, 8)
GROWTH_ELEMENTS = 4 << 20
PIECES = (PIECE_BYTES // 4, PIECE_BYTES // 2, PIECE_BYTES, 2 * PIECE_BYTES)
LEAVE_SECONDS = 10.0
HERE = Path(__file__).resolve()
HIVEMIND = "hivemind==1.1.12"
HIVEMIND_ENVIRONMENT = HERE.parent.parent / ".venv-hivemind"


class Members:
    """Processes that average together on request."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        told = [self._read(process) for process in processes]
        self._tell([json.dumps(told)] * len(processes))
        self._read_all()

    def once(self) -> tuple[float, list[Any]]:
        """Run one all-reduce; return its seconds and the answers of the members."""
        self._tell(["ready"] * len(self._processes))
        self._read_all()
        begin = time.perf_counter()
        self._tell(["go"] * len(self._processes))
        answers = self._read_all()
        return time.perf_counter() - begin, answers

    def _tell(self, lines: list[str]) -> None:
        for process, line in zip(self._processes, lines, strict=True):
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _read_all(self) -> list[Any]:
        return [self._read(process) for process in self._processes]

    def _read(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a member died with exit code {process.wait(10)}")
        return json.loads(line)


@contextmanager
def members(command: Sequence[str], count: int, elements: int) -> Iterator[Members]:
    """Start the members; ask them to exit at the end, and kill those that do not."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(elements)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if _is_ours(command) else subprocess.DEVNULL,
            env=environment,
            text=True,
            start_new_session=True,  # hivemind's members have child processes
        )
        for rank in range(count)
    ]
    try:
        yield Members(processes)
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_ours(command: Sequence[str]) -> bool:
    return command[0] == sys.executable


def ours(kind: str, *more: str) -> list[str]:
    """Return the command of a member in this file."""
    return [sys.executable, str(HERE), kind, *more]


def say(value: Any) -> None:
    """Send an answer to the parent."""
    print(json.dumps(value), flush=True)


def orders() -> Iterator[None]:
    """Yield once for each all-reduce to run."""
    for line in sys.stdin:
        if line.strip() == "go":
            yield
        else:
            say("ready")


class _Handler:
    def __init__(self, exchange: AllReduce) -> None:
        self._exchange = exchange

    def on_message(self, link: Link, message: Message) -> None:
        self._exchange.take(link, message)

    def on_lost(self, link: Link, reason: str) -> None:
        self._exchange.lost(link, reason)


def ravnest(piece_bytes: int, rank: int, count: int, elements: int) -> None:
    """Run a member of Ravnest."""
    torch.set_num_threads(1)
    exchange = AllReduce({0: elements}, piece_bytes=piece_bytes)
    transport, handler = SocketTransport(), _Handler(exchange)
    hello = Hello(PROTOCOL, "benchmark", rank, rank, 0)
    address = transport.serve(Address("127.0.0.1", 0), lambda peer: hello, handler, lambda link: None)
    say(address.port)
    ports = json.loads(sys.stdin.readline())
    target = Address("127.0.0.1", ports[(rank + 1) % count])
    successor = transport.dial(target, hello, handler, deadline=30)
    vector = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
    sink = Sink(torch.zeros(elements))
    part = RingPart(vector, 1 / count, rank, count, (rank - 1) % count, successor, sink=sink)
    ended: SimpleQueue[AllReduceResult] = SimpleQueue()
    say("connected")
    for number, _ in enumerate(orders()):
        exchange.start(RoundId(number), {0: part}, ended.put)
        result = ended.get(timeout=60)
        say([result.problem, result.digests.get(0), result.sent_bytes])


def gloo(rank: int, count: int, elements: int) -> None:
    """Run a member of torch.distributed (gloo)."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not rank else None
    say(store.port if store else 0)
    port = json.loads(sys.stdin.readline())[0]
    store = store or dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    vector = torch.randn(elements)
    say("connected")
    for _ in orders():
        dist.all_reduce(vector)
        say("done")


def hivemind() -> list[str] | str:
    """Return the command of a member in its own environment, or why it cannot be installed."""
    python = HIVEMIND_ENVIRONMENT / "bin" / "python"
    if not (HIVEMIND_ENVIRONMENT / "ready").exists():
        venv.create(HIVEMIND_ENVIRONMENT, with_pip=True, clear=True)
        constraints = HIVEMIND_ENVIRONMENT / "constraints.txt"
        constraints.write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        done = subprocess.run([*pip, HIVEMIND], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"cannot be installed here: {done.stderr.strip().splitlines()[-1]}"
        (HIVEMIND_ENVIRONMENT / "ready").touch()
    return [str(python), str(HERE.with_name("allreduce_hivemind.py"))]


def race(contenders: dict[str, list[str]], rounds: int) -> dict[str, float]:
    """Return the median seconds of contenders that take turns, without the first two runs."""
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(members(command, MEMBERS, ELEMENTS))
            for name, command in contenders.items()
        }
        times: dict[str, list[float]] = {name: [] for name in opened}
        for _ in range(rounds + 2):
            for name, group in opened.items():
                seconds, answers = group.once()
                assert all(answer == answers[0] for answer in answers), f"{name}: {answers}"
                times[name].append(seconds)
    return {name: statistics.median(column[2:]) for name, column in times.items()}


def measure() -> str:
    """Return the report as Markdown."""
    other = hivemind()
    contenders = {"ravnest": ours("ravnest", str(PIECE_BYTES)), "gloo": ours("gloo")}
    if isinstance(other, list):
        contenders["hivemind"] = other
    seconds = race(contenders, ROUNDS)
    mine, theirs = seconds["ravnest"], seconds["gloo"]
    rows = [
        f"| 64 MiB between {MEMBERS} processes, compared with | Ravnest's time relative to it"
        " (above 1 is slower) | required |",
        "|---|---|---|",
        f"| gloo | {mine / theirs:.2f}x | at most 3x |",
    ]
    if "hivemind" in seconds:
        third = seconds["hivemind"]
        rows.append(f"| {HIVEMIND} | {mine / third:.2f}x | at most 0.33x |")
    else:
        rows.append(f"| {HIVEMIND} | {other} | at most 0.33x |")
    return "\n".join([*rows, "", *_pieces(), "", *_growth()])


def _pieces() -> list[str]:
    names = {f"{size >> 10} KiB": ours("ravnest", str(size)) for size in PIECES}
    seconds = race(names, ROUNDS // 2)
    columns = " | ".join(names)
    best = min(seconds.values())
    figures = " | ".join(f"{value / best:.2f}" for value in seconds.values())
    return [
        f"| chunk size | {columns} |",
        "|---|" + len(names) * "---|",
        f"| time, relative to the shortest | {figures} |",
    ]


def _growth() -> list[str]:
    sent = []
    for count in GROWTH:
        with members(ours("ravnest", str(PIECE_BYTES)), count, GROWTH_ELEMENTS) as group:
            _, answers = group.once()
            sent.append(max(answer[2] for answer in answers))
    columns = " | ".join(str(count) for count in GROWTH)
    figures = " | ".join(f"{value / (4 * GROWTH_ELEMENTS):.2f}" for value in sent)
    return [
        f"| members | {columns} |",
        "|---|" + len(GROWTH) * "---|",
        f"| bytes sent by each, relative to the vector: 2 (m - 1) / m | {figures} |",
    ]


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            print(measure())
        case ["ravnest", *numbers]:
            ravnest(*map(int, numbers))
        case ["gloo", *numbers]:
            gloo(*map(int, numbers))
