"""Program of the planner process: reads a request, plans, ships or checks, writes the reply, and so on.

A model is a file of a requester, a result one of a provider, and both may hold anything. Their size in
memory and the time that they take are limited here, and a crash ends this process only.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import psutil

from ravnest import host
from ravnest.errors import RavnestError
from ravnest.plan.infeasible import Infeasible
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.checkpoint_check import manifest_misfit
from ravnest.server.result_check import ShippedResultCheck
from ravnest.server.scheduling.estimates import estimate_job
from ravnest.server.scheduling.planner_messages import (
    EstimateQuestion,
    FilesChecked,
    FilesQuestion,
    JobEstimated,
    JobInfeasible,
    JobPlanned,
    JobShipped,
    ManifestQuestion,
    PlannerFailed,
    PlannerReady,
    PlannerReply,
    PlannerRequest,
    PlanRequest,
    ShipRequest,
    read_message,
    write_message,
)
from ravnest.server.scheduling.shipping import ArtifactPlanner

_NICE = 5
"""Priority of the process: the server's answers come first."""
_log = logging.getLogger(__name__)


class PlannerProgram:
    """Answers requests, one at a time."""

    def __init__(self) -> None:
        self._planner: ArtifactPlanner | None = None
        self._folders: tuple[str, str] | None = None

    def answer(self, request: PlannerRequest) -> PlannerReply:
        """Return the plan, the assignments or the estimate, or the error that prevents them."""
        try:
            if isinstance(request, EstimateQuestion):
                return JobEstimated(estimate_job(request))
            if isinstance(request, FilesQuestion):
                return FilesChecked(_problem(request))
            planner = self._planner_of(request)
            if isinstance(request, PlanRequest):
                found = planner.plan(request.spec, request.providers, request.links)
                return JobInfeasible(found) if isinstance(found, Infeasible) else JobPlanned(found)
            return JobShipped(planner.ship(request.job, request.planned))
        except RavnestError as error:
            return PlannerFailed(type(error).__name__, str(error))
        except OSError as error:
            return PlannerFailed("OSError", error.strerror or str(error), error.errno or 0)
        except Exception as error:
            _log.exception("the planner failed")
            return PlannerFailed(type(error).__name__, str(error))

    def _planner_of(self, request: PlanRequest | ShipRequest) -> ArtifactPlanner:
        """Return the planner of a server's folder; it remembers the last model."""
        folders = (request.artifacts, request.scratch)
        if self._planner is None or self._folders != folders:
            artifacts, scratch = map(Path, folders)
            self._planner, self._folders = ArtifactPlanner(ArtifactFolder(artifacts), scratch), folders
        return self._planner


def _problem(question: FilesQuestion) -> str:
    """Return what is wrong with the files of a provider; empty if nothing is."""
    if isinstance(question, ManifestQuestion):
        return manifest_misfit(Path(question.path), question.uploaded, question.stages)
    check = ShippedResultCheck(ArtifactFolder(Path(question.artifacts)).path)
    return check(question.files, {each.node: each for each in question.cluster})


def main(argv: Sequence[str] | None = None) -> None:
    """Answer the requests of the standard input until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=int, required=True, help="bytes that models may take")
    memory = parser.parse_args(argv).memory
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the replies
    host.disable_core_dumps()
    host.lower_priority(_NICE)
    host.limit_data_memory(host.data_memory(psutil.Process()) + memory)
    requests: SimpleQueue[PlannerRequest] = SimpleQueue()
    threading.Thread(target=_read_all, args=(sys.stdin.buffer, requests), daemon=True).start()
    program = PlannerProgram()
    write_message(replies, PlannerReady())
    while True:
        write_message(replies, program.answer(requests.get()))


def _read_all(stream: IO[bytes], requests: SimpleQueue[PlannerRequest]) -> None:
    """Queue the requests; end this process, whatever it does, when the server is gone."""
    try:
        while True:
            requests.put(read_message(stream, PlannerRequest))
    except BaseException:
        os._exit(0)


if __name__ == "__main__":
    main()
