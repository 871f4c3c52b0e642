"""Relay in a child process: started, told which jobs run, started again if it dies, stopped."""

from __future__ import annotations

import contextlib
import logging
import random
import subprocess
import sys
import threading

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ravnest import host
from ravnest.deadlines import (
    JITTER,
    RELAY_FIRST_PAUSE,
    RELAY_LONGEST_PAUSE,
    RELAY_START,
    RELAY_STOP,
)
from ravnest.errors import RelayError
from ravnest.relay.limits import RelayLimits
from ravnest.relay.program import RelayConfig, RelayFailed, RelayReady, RelayUpdate
from ravnest.types import Address

logger = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 16


class RelayProcess:
    """Relay in a process of its own, which ends with this one; its methods are for all threads."""

    def __init__(
        self,
        listen: Address,
        key: Ed25519PublicKey,
        limits: RelayLimits,
        jobs: frozenset[str] | None,
    ) -> None:
        """``jobs`` are those that run now; ``None`` serves every job with a valid ticket."""
        self._listen = listen
        self._key = key
        self._limits = limits
        self._jobs = jobs
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """Address at which it listens, with the actual port, which restarts keep; once started."""
        assert self._port is not None
        return Address(self._listen.host, self._port)

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` while no process runs."""
        with self._changed:
            return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the relay and wait until it listens; ``RelayError`` if it cannot."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._supervise, name="relay process", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._port or self._failure, RELAY_START)
            if self._port is not None:
                return
            failure = self._failure or f"its process did not start within {RELAY_START:g} s"
        self.stop()
        raise RelayError(f"the relay cannot start: {failure}")

    def set_running_jobs(self, jobs: frozenset[str] | None) -> None:
        """Have the relay serve only these jobs and cut all others; ``None`` serves all."""
        with self._changed:
            if jobs == self._jobs:
                return
            self._jobs = jobs
            if self._process is not None:
                self._write(self._process, RelayUpdate(_listed(jobs)))

    def stop(self) -> None:
        """End the process."""
        self._stopping.set()
        with self._changed:
            process = self._process
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(RELAY_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread is not None:
            self._thread.join(RELAY_STOP)

    def _supervise(self) -> None:
        """Run one process after the other until stopped."""
        pause = RELAY_FIRST_PAUSE
        while not self._stopping.is_set():
            if self._run_once():
                pause = RELAY_FIRST_PAUSE
            if self._stopping.is_set() or self._port is None:
                return
            logger.warning("the relay at %s ended and is started again", self.address)
            self._stopping.wait(pause * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 - no secret
            pause = min(2 * pause, RELAY_LONGEST_PAUSE)

    def _run_once(self) -> bool:
        """Run a process to its end; return whether it listened."""
        try:
            process = self._launch()
        except OSError as error:
            self._report(RelayFailed(str(error)))
            return False
        assert process.stdout is not None
        line = process.stdout.readline(_LONGEST_LINE)
        outcome: RelayReady | RelayFailed
        try:
            outcome = msgspec.json.decode(line, type=RelayReady | RelayFailed)
        except msgspec.DecodeError:
            outcome = RelayFailed("its process ended at once; its output says why")
        self._report(outcome)
        process.wait()
        with self._changed:
            self._process = None
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close() if stream is not None else None
        return isinstance(outcome, RelayReady)

    def _launch(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "ravnest.relay"]
        with self._changed:
            process = host.start_process(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = process
            port = self._port or self._listen.port
            key = self._key.public_bytes_raw()
            jobs = _listed(self._jobs)
            self._write(process, RelayConfig(self._listen.host, port, key, self._limits, jobs))
        if self._stopping.is_set():  # stop() did not see the process
            process.kill()
        return process

    def _report(self, outcome: RelayReady | RelayFailed) -> None:
        with self._changed:
            match outcome:
                case RelayReady(port):
                    self._port = port
                case RelayFailed(reason):
                    self._failure = reason
                    logger.warning("the relay cannot start: %s", reason)
            self._changed.notify_all()

    def _write(self, process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
        """Write a line; a process that has ended gets all of it when it is started again."""
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()


def _listed(jobs: frozenset[str] | None) -> list[str] | None:
    return None if jobs is None else sorted(jobs)
