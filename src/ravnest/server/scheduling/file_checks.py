"""Checks of uploaded results and checkpoints, in a child process with limits of memory and time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from ravnest.errors import JobError
from ravnest.schemas.checkpoints import UploadedCheckpoint
from ravnest.schemas.jobs import ResultFile
from ravnest.schemas.providers import Assignment
from ravnest.server.scheduling.planner_messages import (
    FilesChecked,
    FilesQuestion,
    ManifestQuestion,
    PlannerFailed,
    ResultQuestion,
)
from ravnest.server.scheduling.planner_process import PlannerProcess
from ravnest.server.settings import PlanningLimits

_SECONDS = 60.0
"""Time for one check; the files of a large model take less than a second."""


class FileCheckingProcess:
    """Reads files of providers, which may hold anything, in a process of its own. Thread-safe."""

    def __init__(
        self, artifacts: Path, limits: PlanningLimits, process: PlannerProcess | None = None
    ) -> None:
        self._artifacts = str(artifacts.absolute())
        self._process = process or _shared_process(limits.memory)

    def check_result(self, files: Sequence[ResultFile], cluster: Mapping[int, Assignment]) -> str:
        """Return why files are not the trained stages of a cluster; empty if they are."""
        return self._ask(ResultQuestion(self._artifacts, tuple(files), tuple(cluster.values())))

    def check_manifest(self, path: Path, uploaded: UploadedCheckpoint, stages: int) -> str:
        """Return why a file is not the manifest of this checkpoint; empty if it is."""
        return self._ask(ManifestQuestion(str(path.absolute()), uploaded, stages))

    def _ask(self, question: FilesQuestion) -> str:
        try:
            reply = self._process.ask(question, _SECONDS)
        except JobError as error:
            return f"its files cannot be checked: {error}"
        if isinstance(reply, PlannerFailed):
            return f"its files cannot be checked: {reply.message}"
        assert isinstance(reply, FilesChecked), reply
        return reply.problem


@functools.cache
def _shared_process(memory: int) -> PlannerProcess:
    """Return the checking process of all servers in this program: no plan delays a check."""
    return PlannerProcess(memory)
