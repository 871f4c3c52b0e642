"""A worker process: started, watched and ended; what it has written is passed on."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ravnest.provider.events import Learned, TurnedAway, WorkerEnded
from ravnest.provider.job_dir import JobDir, WorkerSettings
from ravnest.provider.limits import HOME, TEMPORARY, environment, excess, held_memory
from ravnest.provider.tls_rejections import is_logged, kind_of
from ravnest.schemas.providers import TlsRejections

_SAMPLE_SECONDS = 0.25
_GRACE_SECONDS = 10.0
"""For a worker to say goodbye to its neighbours."""
_OUTPUT_SECONDS = 2.0
"""For its last words to arrive, once it has ended."""
_LONGEST_LINE = 1 << 16
_LONGEST_REASON = 2000
_TAIL = 1 << 14
_BOOT = (
    "import runpy, sys\n"
    "runpy.run_path(sys.argv[1] + '/ravnest/provider/limits.py')['confine']()\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from ravnest.provider.worker import work\n"
    "sys.exit(work(sys.argv[2]))\n"
)
"""``python -m ravnest.provider.worker`` of the Ravnest that this process runs, installed or not, and
confined before the seconds that importing torch takes."""

Tell = Callable[[Learned | TurnedAway | WorkerEnded], None]


@dataclass
class FigureTail:
    """Figures of a file that another process adds lines to."""

    path: Path
    _offset: int = 0

    def read(self) -> tuple[float | None, ...]:
        """Those that are new, None for one that is infinite or no number.

        A line that is not whole yet waits for its rest.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return ()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return tuple(_finite(line) for line in whole.splitlines())


def _finite(line: bytes) -> float | None:
    try:
        figure = float(line)
    except ValueError:
        return None
    return figure if math.isfinite(figure) else None


@dataclass
class WorkerProcess:
    """The worker of one assignment."""

    assignment: str
    place: JobDir
    cluster: int
    settings: WorkerSettings
    tell: Tell
    _process: subprocess.Popen[bytes] = field(init=False)
    _listener: threading.Thread = field(init=False)
    _ended: threading.Event = field(default_factory=threading.Event)
    _wake: threading.Event = field(default_factory=threading.Event)
    _kill_at: float | None = None
    _reason: str = ""
    _idle: int | None = None

    def start(self) -> None:
        """Start it; call from a thread that lives as long as the worker may."""
        place = self.place
        place.write_settings(self.settings)
        for name in (HOME, TEMPORARY):
            (place.folder / name).mkdir(exist_ok=True)
        root = Path(__file__).parents[2]
        place.errors.touch()
        with place.output.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own worker
                [sys.executable, "-I", "-c", _BOOT, str(root), str(place.folder)],
                cwd=place.folder,
                env=environment(place.folder, self.settings.cores),
                stdin=subprocess.PIPE,  # it ends when this is closed
                stdout=output,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        threads = [
            threading.Thread(target=target, name=f"worker {self.assignment}", daemon=True)
            for target in (self._listen, self._wait, self._follow)
        ]
        self._listener = threads[0]
        for thread in threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def stop(self) -> None:
        """Ask it to end; it is killed if it does not."""
        self._kill_at = time.monotonic() + _GRACE_SECONDS
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """End it at once, with all that it may have started."""
        self._signal(signal.SIGKILL)
        self._ended.wait(_GRACE_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    def _wait(self) -> None:
        self._process.wait()
        self._ended.set()
        self._wake.set()

    def _listen(self) -> None:
        """Keep what the worker says on stderr; what gRPC says there is only counted."""
        stream = self._process.stderr
        assert stream is not None
        strangers = TlsRejections()
        with stream, self.place.errors.open("wb", buffering=0) as errors:
            while line := stream.readline(_LONGEST_LINE):
                text = line.decode("utf-8", "replace")
                if kind := kind_of(text):
                    strangers = strangers.model_copy(update={kind: getattr(strangers, kind) + 1})
                    self.tell(TurnedAway(self.assignment, strangers))
                elif not is_logged(text):
                    errors.write(line)

    def _follow(self) -> None:
        process = psutil.Process(self._process.pid)
        losses = FigureTail(self.place.losses_of(self.cluster))
        validations = FigureTail(self.place.figures_of(self.cluster))
        figures: tuple[float | None, ...] = ()
        over = False
        while not over:
            over = self._wake.wait(_SAMPLE_SECONDS)
            if not over:
                self._watch(process)
            new, more = losses.read(), validations.read()
            figures += more
            if new or more:
                self.tell(Learned(self.assignment, new, figures))
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._listener.join(_OUTPUT_SECONDS)
        self.tell(WorkerEnded(self.assignment, self._failure()))

    def _watch(self, process: psutil.Process) -> None:
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._signal(signal.SIGKILL)
        if self._idle is None:
            self._idle = _idle_of(self.place.idle)
        elif not self._reason:
            self._reason = excess(held_memory(process), self._idle, self.settings.ram)
            if self._reason:
                self._signal(signal.SIGKILL)

    def _failure(self) -> str:
        code = self._process.returncode
        if self._reason:
            return self._reason
        if code == 0:
            return ""
        if code < 0:
            return f"the worker was ended by {signal.Signals(-code).name}"
        return last_line(self.place.errors) or f"the worker ended with exit code {code}"


def _idle_of(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None


def last_line(path: Path) -> str:
    """The last line of a file that has something in it, shortened."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST_REASON]
