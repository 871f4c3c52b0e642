"""Load of a server: providers that send heartbeats every five seconds, all of them training jobs.

A real server process (only its planner is that of the tests, which needs no model) and one process
that simulates the providers, each with a connection of its own. Every heartbeat of a provider reports a
record, and some a warning, which becomes an event; with ``--timings``, Roots also report the timings of
all stages for every second, as real ones do. Run as a script to print the table; a growing number
of providers shows how the cost grows. The time is bounded: ``--seconds`` for each number of providers.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvicorn

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / each) for each in ("server", ".")]
from server_cases import FILES, FakePlanner, offer, spec

from ravnest.host import raise_file_limit, start_process
from ravnest.schemas.auth import ApiRole
from ravnest.server.http.app import create_app
from ravnest.server.http.connections import CountedListener, limited_protocol
from ravnest.server.http.listener import listen
from ravnest.server.http.runner import avoid_pauses
from ravnest.server.server import Server
from ravnest.server.settings import ServerSettings
from ravnest.telemetry import LossRecord, QueueRecord, TimingRecord, WarningRecord

COUNTS = (10, 100, 1000)
JOBS = 20
PIPELINE = 5
"""Nodes of a cluster."""
INTERVAL = 5.0
"""Seconds between two heartbeats of a provider."""
AT_ONCE = 50
"""Requests at the same time before the measurement."""
PATIENCE = 300.0
"""Seconds of silence that the server tolerates: on a busy machine, the first providers wait for long
until the last ones have joined."""
LOOK = 0.005
"""Seconds between two looks at the event loop of the server."""
WARNINGS = 3
"""Warnings of each provider in a run."""


def serve(folder: Path) -> None:
    """Run a server until it is terminated; print its address, a token and the admin's credential."""
    raise_file_limit()
    settings = ServerSettings(lost_after=PATIENCE, training_silence=PATIENCE)
    server = Server(folder, planner=FakePlanner(size=PIPELINE), settings=settings)
    with server.opened(), CountedListener(listen("127.0.0.1", 0), server.connections) as listener:
        tokens = {role: server.auth.create_token(role, "", uses=None).secret for role in ApiRole}
        port = listener.getsockname()[1]
        admin = server.folder.admin.read_text()
        print(json.dumps({"port": port, "tokens": tokens, "admin": admin}), flush=True)
        config = uvicorn.Config(
            create_app(server),
            http=limited_protocol(server.connections, server.settings.connections, listener),
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=30,
        )
        avoid_pauses()
        asyncio.run(serve_and_watch(uvicorn.Server(config), listener))


async def serve_and_watch(server: uvicorn.Server, listener: socket.socket) -> None:
    """Run a server; at SIGUSR1, print the longest pause of its event loop since the last one."""
    loop, longest = asyncio.get_running_loop(), [0.0]

    def tell() -> None:
        print(longest[0], flush=True)
        longest[0] = 0.0

    async def watch() -> None:
        while True:
            before = loop.time()
            await asyncio.sleep(LOOK)
            longest[0] = max(longest[0], loop.time() - before - LOOK)

    loop.add_signal_handler(signal.SIGUSR1, tell)
    watching = asyncio.ensure_future(watch())
    await server.serve(sockets=[listener])
    watching.cancel()


class Connection:
    """HTTP connection of one member; one request at a time."""

    def __init__(self, port: int, credential: str = "") -> None:
        self._port = port
        self._credential = credential
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, path: str, body: Any = None, expected: int = 200) -> Any:
        """Send a request and return the parsed answer; the server closes connections that are idle."""
        if self._streams is not None:
            try:
                return await self._call(self._streams, method, path, body, expected)
            except (ConnectionError, asyncio.IncompleteReadError):
                self._streams[1].close()
        self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return await self._call(self._streams, method, path, body, expected)

    async def _call(
        self,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        method: str,
        path: str,
        body: Any,
        expected: int,
    ) -> Any:
        reader, writer = streams
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n"
        )
        if self._credential:
            head += f"Authorization: Bearer {self._credential}\r\n"
        writer.write(head.encode() + b"\r\n" + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.split("content-length: ")[1].split("\r\n")[0])
        text = await reader.readexactly(length)
        status = int(answer.split(" ")[1])
        if status != expected:
            raise RuntimeError(f"{method} {path}: {status} {text[:500]!r}")
        return json.loads(text) if text else None


@dataclass
class Provider:
    """A simulated provider."""

    id: str
    connection: Connection
    number: int
    timings: bool = False
    """Report timings too, at a Root."""
    assignment: str | None = None
    records: int = 0
    warnings: int = 0
    seconds: list[float] = field(default_factory=list)

    async def beat(self, update: int | None) -> None:
        """Send a heartbeat, with a record of this update if the provider trains."""
        report = None
        if self.assignment is not None:
            new: list[Any] = []
            if update is not None:
                is_root = self.number % PIPELINE == 0
                new.append(LossRecord(update, 0, 1.0, 1, 0) if is_root else QueueRecord(1, 2, 3))
                if is_root and self.timings:
                    new += [_timing(stage) for _ in range(int(INTERVAL)) for stage in range(PIPELINE)]
                if update % 2 == 1 and self.warnings < WARNINGS:
                    new.append(WarningRecord(f"warning {update}"))
                    self.warnings += 1
            report = {
                "assignment": self.assignment,
                "phase": "training",
                "first_record": self.records,
                "records": [asdict(each) for each in new],
            }
            self.records += len(new)
        body = {"report": report, "known": self.assignment, "may_train": True, "wait": 0}
        begin = time.perf_counter()
        reply = await self.connection.call("POST", f"/api/providers/{self.id}/heartbeat", body)
        self.seconds.append(time.perf_counter() - begin)
        self.assignment = reply["assignment"]
        if self.assignment is not None and reply["records_known"] != self.records:
            raise RuntimeError(
                f"{self.id}: {reply['records_known']} of {self.records} records are known"
            )

    async def run(self, rounds: int, begin: float) -> None:
        """Send heartbeats at fixed times, whether the server is late or not."""
        loop = asyncio.get_running_loop()
        for update in range(rounds):
            await asyncio.sleep(begin + update * INTERVAL - loop.time())
            await self.beat(update)


def _timing(stage: int) -> TimingRecord:
    return TimingRecord(stage, 5, 0.1, 0.2, 0.01, 0.02, 0.02)


async def joined(server: dict[str, Any], role: ApiRole, name: str) -> tuple[str, Connection]:
    """Return the id and the connection of a new member."""
    first = Connection(server["port"])
    body = {"secret": server["tokens"][role], "name": name}
    reply = await first.call("POST", "/api/join", body)
    return reply["id"], Connection(server["port"], reply["credential"])


async def offered(server: dict[str, Any], number: int, timings: bool) -> Provider:
    """Return a provider that has joined and offered its machine."""
    member, connection = await joined(server, ApiRole.PROVIDER, f"p{number}")
    machine = offer(f"p{number}", address=f"127.0.0.1:{10_000 + number}").model_dump(mode="json")
    await connection.call("POST", "/api/providers", machine)
    return Provider(member, connection, number, timings)


async def prepare(server: dict[str, Any], count: int, jobs: int, timings: bool) -> list[Provider]:
    """Have providers join, and jobs start on all of them."""
    providers: list[Provider] = []
    for start in range(0, count, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, count))
        providers += await asyncio.gather(*(offered(server, number, timings) for number in numbers))
    _, requester = await joined(server, ApiRole.REQUESTER, "rita")
    for content in FILES.values():
        path = (
            f"/api/artifacts/{hashlib.sha256(content).hexdigest()}/upload?offset=0&size={len(content)}"
        )
        await requester.call("PUT", path, content)
    share = count // jobs
    for number in range(jobs):
        job = spec(f"job {number}", min_providers=share, max_providers=share)
        await requester.call("POST", "/api/jobs", job.model_dump(mode="json"), 201)
    for _ in range(120):
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*(each.beat(None) for each in providers[start : start + AT_ONCE]))
        if sum(each.assignment is not None for each in providers) == jobs * share:
            break
        await asyncio.sleep(0.5)
    return providers


async def count_warnings(server: dict[str, Any]) -> int:
    """Return the number of events about warnings."""
    admin, after, found = Connection(server["port"], server["admin"]), 0, 0
    while events := await admin.call("GET", f"/api/events?after={after}"):
        after = events[-1]["sequence"]
        found += sum(each["kind"] == "warning" for each in events)
    return found


async def measure(
    server: dict[str, Any], process: psutil.Process, count: int, seconds: float, timings: bool
) -> str:
    """Return the row of a number of providers."""
    jobs = min(JOBS, count // PIPELINE)
    providers = await prepare(server, count, jobs, timings)
    for each in providers:
        each.seconds.clear()
    rounds = max(round(seconds / INTERVAL), 1)
    begin = asyncio.get_running_loop().time() + 0.5
    process.send_signal(signal.SIGUSR1)
    waited = waited_for_core(process.pid)
    before, started, own = process.cpu_times(), time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(each.run(rounds, begin + INTERVAL * n / count) for n, each in enumerate(providers))
    )
    after, elapsed = process.cpu_times(), time.perf_counter() - started
    cpu = after.user + after.system - before.user - before.system
    own = time.process_time() - own
    waited = waited_for_core(process.pid) - waited
    times = sorted(second for each in providers for second in each.seconds)
    expected, found = sum(each.warnings for each in providers), await count_warnings(server)
    training = sum(each.assignment is not None for each in providers)
    p99 = statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]
    return (
        f"| {count} | {jobs} | {training} | {len(times)} | {statistics.median(times) * 1e3:.1f} |"
        f" {p99 * 1e3:.1f} | {times[-1] * 1e3:.0f} | {cpu / len(times) * 1e3:.1f} |"
        f" {100 * cpu / elapsed:.0f} % | {100 * own / elapsed:.0f} % | {expected - found} |"
        f" {100 * waited / elapsed:.0f} % | {os.getloadavg()[0]:.1f} |"
    )


def waited_for_core(pid: int) -> float:
    """Return the seconds for which the threads of a process were ready, and others had the cores."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found += int((task / "schedstat").read_text().split()[1])
    return found / 1e9


def run(count: int, seconds: float, timings: bool) -> str:
    """Measure a new server."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, __file__, "--serve", folder]
        with start_process(argv, ends_with_us=True, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                server = json.loads(process.stdout.readline())
                row = asyncio.run(measure(server, psutil.Process(process.pid), count, seconds, timings))
                process.send_signal(signal.SIGUSR1)
                pause = [float(process.stdout.readline()) for _ in range(2)][1]
            finally:
                process.terminate()
    return f"{row} {pause * 1e3:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, help="run the server in this folder")
    parser.add_argument("--providers", type=int, nargs="*", default=COUNTS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--timings", action="store_true", help="Roots report timings, too")
    chosen = parser.parse_args()
    if chosen.serve is not None:
        serve(chosen.serve)
        return
    raise_file_limit()
    print(
        "| providers | jobs | training | heartbeats | median ms | p99 ms | longest ms | CPU ms each |"
        " CPU | CPU of the providers | lost events | waited for a core | load average |"
        " longest pause ms |"
    )
    print("|---" * 14 + "|")
    for count in chosen.providers:
        print(run(count, chosen.seconds, chosen.timings), flush=True)


if __name__ == "__main__":
    main()
