"""How fast members of a ring average.

All members are processes on loopback with one thread of torch each; a time is from the word "go" to
the answer of the last member, and the contenders take turns. Ours goes over the gRPC transport, with
frames, checksums, weights and a digest of the result. Gloo's only sums. Hivemind has found its group
before the clock starts. Run as a script it prints its report.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ELEMENTS = 16 << 20
MEMBERS = 4
ROUNDS = 7
GROWTH = (2, 4, 8)
HERE = Path(__file__).resolve()
HIVEMIND = "hivemind==1.1.12"
HIVEMIND_SCRIPT = HERE.with_name("allreduce_hivemind.py")
HIVEMIND_ENVIRONMENT = HERE.parent.parent / ".venv-hivemind"


class Members:
    """Processes that average together when told to."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        told = [self._read(process) for process in processes]
        self._tell([json.dumps(told)] * len(processes))
        self._read_all()

    def once(self) -> tuple[float, list[Any]]:
        """Seconds of one all-reduce, and what the members say of it."""
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
def members(command: list[str], count: int, elements: int) -> Iterator[Members]:
    """Started, and killed at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(elements)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield Members(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def say(value: Any) -> None:
    """To the parent."""
    print(json.dumps(value), flush=True)


def orders() -> Iterator[None]:
    """One for each all-reduce that is to run now."""
    for line in sys.stdin:
        if line.strip() == "go":
            yield
        else:
            say("ready")


def ravnest(rank: int, count: int, elements: int) -> None:
    """A member of ours."""
    from queue import SimpleQueue

    import torch

    from ravnest.averaging.exchange import Exchange, Exchanged, RingPart
    from ravnest.averaging.ring import PIECE_BYTES
    from ravnest.transport.base import Link
    from ravnest.transport.grpc_transport import GrpcTransport
    from ravnest.types import Address
    from ravnest.wire.messages import PROTOCOL, Hello, Message, RoundId

    torch.set_num_threads(1)
    exchange = Exchange({0: elements}, piece_bytes=int(os.environ.get("PIECE_BYTES", PIECE_BYTES)))

    class Handler:
        def on_message(self, link: Link, message: Message) -> None:
            exchange.take(link, message)

        def on_lost(self, link: Link, reason: str) -> None:
            exchange.lost(link, reason)

    def hello(node: int) -> Hello:
        return Hello(PROTOCOL, "benchmark", node, node, 0)

    transport, handler = GrpcTransport(), Handler()
    address = transport.serve(
        Address("127.0.0.1", 0), lambda peer: hello(rank), handler, lambda link: None
    )
    say(address.port)
    ports = json.loads(sys.stdin.readline())
    target = Address("127.0.0.1", ports[(rank + 1) % count])
    successor = transport.dial(target, hello(rank), handler, deadline=30)
    generator = torch.Generator().manual_seed(rank)
    vector, into = torch.randn(elements, generator=generator), torch.empty(elements)
    part = RingPart(vector, 1 / count, rank, count, (rank - 1) % count, successor, into=into)
    ended: SimpleQueue[Exchanged] = SimpleQueue()
    say("connected")
    for number, _ in enumerate(orders()):
        exchange.start(RoundId(number), {0: part}, ended.put)
        result = ended.get(timeout=60)
        say([result.problem, result.digests.get(0), result.sent_bytes])


def gloo(rank: int, count: int, elements: int) -> None:
    """A member of torch.distributed."""
    import torch
    import torch.distributed as dist

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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"ravnest": ravnest, "gloo": gloo}[sys.argv[1]](*map(int, sys.argv[2:]))
    else:
        print(measure())
