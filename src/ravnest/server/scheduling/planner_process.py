"""Planner in a child process with limits of memory and time; a hostile model fails its own job only."""

from __future__ import annotations

import contextlib
import functools
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ravnest import errors, host
from ravnest.errors import JobError, RavnestError
from ravnest.plan.infeasible import Infeasible
from ravnest.schemas.estimates import JobEstimate
from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.providers import Assignment
from ravnest.server.reachability.relays import RelayService
from ravnest.server.scheduling.link_tests import ProviderLinks
from ravnest.server.scheduling.planner_messages import (
    EstimateQuestion,
    JobEstimated,
    JobInfeasible,
    JobPlanned,
    JobShipped,
    PlannerFailed,
    PlannerReply,
    PlannerRequest,
    PlanRequest,
    ShipRequest,
    read_message,
    write_message,
)
from ravnest.server.scheduling.planning import Candidates, PlannedJob
from ravnest.server.settings import PlanningLimits

_PROGRAM = "ravnest.server.scheduling.planner_program"
_IDLE_SECONDS = 120.0
"""Time after which an unused process is ended; the next one takes seconds to start."""
_START_SECONDS = 120.0
"""Longest start of the process, which imports torch."""
_log = logging.getLogger(__name__)


class PlannerProcess:
    """Child process that plans; started when it is needed, and again after it has died. Thread-safe."""

    def __init__(self, memory: int, argv: Sequence[str] = (sys.executable, "-m", _PROGRAM)) -> None:
        """``memory``: bytes that a model may take; ``argv``: the program."""
        self._memory = memory
        self._argv = argv
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: threading.Timer | None = None

    def ask(self, request: PlannerRequest, seconds: float) -> PlannerReply:
        """Send a request and return the reply.

        Raise ``JobError`` if the process needs more time or memory than it may have. A process that
        died for another reason is replaced once.
        """
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                return self._ask(request, seconds) or self._ask(request, seconds) or self._died()
            finally:
                self._idle = threading.Timer(_IDLE_SECONDS, self.close)
                self._idle.daemon = True
                self._idle.start()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, request: PlannerRequest, seconds: float) -> PlannerReply | None:
        """Return the reply; ``None`` if the process died."""
        if not self._start():
            return None
        try:
            reply = self._exchange(request, seconds)
        except TimeoutError:
            raise JobError(
                f"it took more than {seconds:g} seconds: use a model with fewer operations"
            ) from None
        if isinstance(reply, PlannerFailed) and reply.kind == "MemoryError":
            self._end()
            raise JobError(
                f"its graph takes more than {self._memory / 1e9:.1f} GB of the server's memory: use a "
                "model with fewer operations"
            )
        return reply

    def _start(self) -> bool:
        """Start the process if none runs; return whether one runs now."""
        if self._process is not None and self._process.poll() is None:
            return True
        self._end()
        argv = [*self._argv, "--memory", str(self._memory)]
        self._process = host.start_process(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            return self._exchange(None, _START_SECONDS) is not None
        except TimeoutError:
            return False

    def _exchange(self, request: PlannerRequest | None, seconds: float) -> PlannerReply | None:
        """Send a request, if there is one, and return the reply; ``None`` if the process died.

        Raise ``TimeoutError`` if it took too long; the process is gone then.
        """
        process, is_late = self._process, threading.Event()
        assert process is not None

        def give_up() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if request is not None:
                write_message(process.stdin, request)
            reply: PlannerReply = read_message(process.stdout, PlannerReply)
        except (OSError, EOFError):
            self._end()
            if is_late.is_set():
                raise TimeoutError from None
            return None
        finally:
            timer.cancel()
        return reply

    def _died(self) -> PlannerReply:
        raise JobError("the planner process of the server died twice; the server's log may say why")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            _close(stream)


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()


@functools.cache
def shared_process(memory: int) -> PlannerProcess:
    """Return the planner process of all servers in this program: it takes seconds to start."""
    return PlannerProcess(memory)


class ProcessPlanner:
    """Job planner that works in a child process; what needs the server's keys is added here."""

    def __init__(
        self,
        artifacts: Path,
        scratch: Path,
        limits: PlanningLimits,
        relays: RelayService | None = None,
        process: PlannerProcess | None = None,
        check_interval: Callable[[float], float] = lambda _: 0.0,
    ) -> None:
        """``check_interval`` returns the mean time between spot checks, of the least that they cost."""
        self._artifacts = str(artifacts.absolute())
        self._scratch = str(scratch.absolute())
        self._limits = limits
        self._relays = relays
        self._process = process or shared_process(limits.memory)
        self._check_interval = check_interval

    def plan(
        self, spec: JobSpec, providers: Candidates, links: ProviderLinks
    ) -> PlannedJob | Infeasible:
        """Plan a job for these providers with the measured figures of their links."""
        request = PlanRequest(self._artifacts, self._scratch, spec, tuple(providers), links)
        reply = self._process.ask(request, self._limits.plan_seconds)
        if isinstance(reply, JobInfeasible):
            return reply.infeasible
        if isinstance(reply, JobPlanned):
            return reply.planned
        raise _error_of(reply)

    def ship(self, job: str, planned: PlannedJob) -> tuple[Assignment, ...]:
        """Write the stages as artifacts; return the assignment of each node, by number."""
        request = ShipRequest(self._artifacts, self._scratch, job, planned)
        reply = self._process.ask(request, self._limits.ship_seconds)
        if not isinstance(reply, JobShipped):
            raise _error_of(reply)
        found = tuple(
            each.model_copy(update={"spot_checks": self._check_interval(each.spot_checks)})
            for each in reply.assignments
        )
        if self._relays is None or not any(each.tls for each in found):
            return found
        specs = self._relays.add_tickets(job, [each.node_spec for each in found], planned.offers)
        return tuple(
            each.model_copy(update={"node_spec": spec}) for each, spec in zip(found, specs, strict=True)
        )


class EstimatingProcess:
    """Estimates of jobs in a child process of their own, so that they never delay a job."""

    def __init__(self, limits: PlanningLimits, process: PlannerProcess | None = None) -> None:
        self._seconds = limits.plan_seconds
        self._process = process or _shared_estimating_process(limits.memory)

    def estimate(self, question: EstimateQuestion) -> JobEstimate:
        """Return the estimate; raise the error that prevents it."""
        reply = self._process.ask(question, self._seconds)
        if isinstance(reply, JobEstimated):
            return reply.estimate
        raise _error_of(reply)


@functools.cache
def _shared_estimating_process(memory: int) -> PlannerProcess:
    """Return the process of the estimates of all servers in this program."""
    return PlannerProcess(memory)


def _error_of(reply: PlannerReply) -> Exception:
    """Return the error that a reply describes, of the same class if it is one of Ravnest's."""
    assert isinstance(reply, PlannerFailed), reply
    if reply.kind == "OSError":
        return OSError(reply.errno, reply.message)
    kind = getattr(errors, reply.kind, None)
    if isinstance(kind, type) and issubclass(kind, RavnestError):
        with contextlib.suppress(TypeError):
            made: Callable[[str], RavnestError] = kind
            return made(reply.message)
    return JobError(f"{reply.kind}: {reply.message}")
