"""A submitted job, from its requester's side."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Self

from ravnest.errors import JobEndedError
from ravnest.http.api import ApiClient
from ravnest.http.retry import RetryPolicy
from ravnest.schemas.jobs import EventView, JobProgress, JobState, JobView, LossHistory

if TYPE_CHECKING:
    import torch

_POLL = 30.0
"""Seconds that the server waits for news before it answers anyway."""
RESTART = RetryPolicy(tries=60, first=0.5, most=10.0)
"""Who waits for a training waits for a server that comes back too: about eight minutes."""


class JobHandle:
    """A job: how it goes, what came of it, and a way to end it.

    Closing it ends the connection, and the server too if it was started for this job; the job
    itself ends by ``cancel()`` only.
    """

    def __init__(
        self,
        job: str,
        api: ApiClient,
        *,
        close: Callable[[], None] | None = None,
        invitation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = job
        self.invitation = invitation
        """The command with which providers join, where the server was started for this job."""
        self._api = api
        self._close = close or api.close
        self._clock = clock
        self._path = f"/api/jobs/{job}"

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r} at {self._api.url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection to the server."""
        self._close()

    def view(self) -> JobView:
        """All that the server says about the job now."""
        return self._api.get(self._path, JobView)

    def state(self) -> JobState:
        """Where the job is in its life."""
        return self.view().state

    def progress(self) -> JobProgress:
        """Updates done, and the last loss and validation figure."""
        return self.view().progress

    def events(self, after: int = 0) -> list[EventView]:
        """What happened to the job, with reasons; only events later than number ``after``."""
        return self._api.get(f"{self._path}/events", list[EventView], params={"after": after})

    def losses(self, first: int = 0) -> LossHistory:
        """The loss of each update from ``first`` on, and all validations."""
        return self._api.get(f"{self._path}/losses", LossHistory, params={"first": first})

    def wait(
        self, timeout: float | None = None, on_change: Callable[[JobView], None] | None = None
    ) -> JobView:
        """Wait until the job has ended, however it did; ``TimeoutError`` after ``timeout`` seconds.

        ``on_change`` is called with each news. A server that is restarted meanwhile is waited for.
        """
        deadline = None if timeout is None else self._clock() + timeout
        view = self.view()
        if on_change is not None:
            on_change(view)
        while not view.state.is_final:
            left = _POLL if deadline is None else min(_POLL, deadline - self._clock())
            if left <= 0:
                raise TimeoutError(
                    f"job {self.id} is still {view.state} after {timeout} s: {view.reason}"
                )
            newer = self._api.get(
                f"{self._path}/wait",
                JobView,
                params={"changed": view.changed, "timeout": left},
                wait=left,
                retry=RESTART,
            )
            if on_change is not None and newer != view:
                on_change(newer)
            view = newer
        return view

    def result(
        self,
        into: torch.nn.Module | None = None,
        *,
        folder: str | Path | None = None,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Wait for the trained model's ``state_dict``; it is loaded ``into`` the model if one is given.

        With a ``folder`` it is kept there as ``trained_state_dict.pt``. ``JobEndedError`` says why a
        job has no result.
        """
        with tempfile.TemporaryDirectory(prefix="ravnest-") as scratch:
            path = self.fetch(scratch if folder is None else folder, timeout=timeout, progress=progress)
            state: dict[str, torch.Tensor] = _results().load_trained(path, into)
        return state

    def fetch(
        self,
        folder: str | Path,
        *,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Path:
        """Wait for the trained model and keep it as ``folder/trained_state_dict.pt``; the path."""
        ended = self.wait(timeout)
        if ended.state is not JobState.DONE:
            raise ended_without_model(ended)
        path: Path = _results().fetch_trained(self._api, self.id, Path(folder), progress)
        return path

    def cancel(self) -> None:
        """End the job; its providers become free. ``ServerRefusedError`` if it is done or failed."""
        self._api.post(f"{self._path}/cancel", None, object, idempotent=True)


def _results() -> ModuleType:
    """What needs torch, which takes seconds to import: not for those who only look at a job."""
    return import_module("ravnest.client.results")


def ended_without_model(view: JobView) -> JobEndedError:
    """Why there is nothing to fetch."""
    what = "was cancelled" if view.state is JobState.CANCELLED else "failed"
    return JobEndedError(f"job {view.id} {what}: {view.reason}")
