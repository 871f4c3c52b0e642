"""Handle of a submitted job."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from html import escape
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from ravnest.client.job_records import JobRecords
from ravnest.client.notebook import JobPicture
from ravnest.client.server_selection import READ_ROLES, select_server
from ravnest.client.traces import job_trace
from ravnest.deadlines import JOB_POLL
from ravnest.errors import JobEndedError, ServerError, SettingsError
from ravnest.http.api import ApiClient
from ravnest.http.retry import RetryPolicy
from ravnest.logs.background import BackgroundSink
from ravnest.schemas.job_changes import JobChanges, StartFrom
from ravnest.schemas.jobs import EventView, JobCreated, JobProgress, JobState, JobView, LossHistory
from ravnest.telemetry import RecordSink
from ravnest.tracing.chrome import chrome_trace

if TYPE_CHECKING:
    import torch

    from ravnest.client.partial_results import PartialModel

logger = logging.getLogger(__name__)

RESTART = RetryPolicy(tries=60, first=0.5, most=10.0)
"""Retries while waiting for a job: they outlast a server restart of about eight minutes."""


_COPY_SECONDS = 600.0
"""Time in which a server copies the trained weights that a job starts from."""


class JobHandle:
    """Handle of a submitted job: its state, its result, and a way to cancel it.

    Closing the handle closes the connection, and the server if ``serve_here`` started one. It does
    not end the job; ``cancel()`` does.
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
        """Command with which providers join; None unless ``serve_here`` started the server."""
        self._api = api
        self._close = close or api.close
        self._clock = clock
        self._path = f"/api/jobs/{job}"

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r} at {self._api.url})"

    def _repr_html_(self) -> str:
        """Return the job as HTML, which notebooks show."""
        try:
            return JobPicture(self).html(self.view())
        except ServerError as error:
            return f"<div>{escape(repr(self))}: {escape(str(error))}</div>"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """Return the job for notebooks: live until it has ended where ``ipywidgets`` is installed."""
        html = self._repr_html_()
        found = {"text/plain": repr(self), "text/html": html}
        try:
            widget = import_module("ipywidgets").HTML(html)
        except ModuleNotFoundError:
            return found
        name = f"ravnest notebook {self.id}"
        threading.Thread(target=self._keep_up, args=(widget,), name=name, daemon=True).start()
        return {**found, **widget._repr_mimebundle_(**options)}

    def _keep_up(self, widget: Any) -> None:
        """Show each change of the job in a widget until the job has ended."""
        picture = JobPicture(self)

        def change(view: JobView) -> None:
            widget.value = picture.html(view)

        try:
            self.wait(on_change=change)
        except Exception as error:  # the handle was closed, or the server is gone: the last state stays
            logger.info("job %s is no longer shown live: %s", self.id, error)

    def show(self, timeout: float | None = None) -> JobView:
        """Show the job in a notebook and keep it up to date until the job has ended."""
        try:
            display = import_module("IPython.display")
        except ModuleNotFoundError as error:
            raise SettingsError(
                "show() draws in a notebook, and IPython is not installed: use wait() or progress(), or "
                "`ravnest status JOB --watch` in a terminal"
            ) from error
        picture = JobPicture(self)
        shown = display.display(display.HTML(self._repr_html_()), display_id=True)

        def change(view: JobView) -> None:
            shown.update(display.HTML(picture.html(view)))

        return self.wait(timeout, change)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection to the server; the job continues."""
        self._close()

    def view(self) -> JobView:
        """Return everything that the server shows about the job."""
        return self._api.get(self._path, JobView)

    def state(self) -> JobState:
        """Return the state of the job."""
        return self.view().state

    def degraded(self) -> str:
        """Return why the model of a job that is done lacks the training of some clusters; or nothing."""
        return self.view().degraded

    def progress(self) -> JobProgress:
        """Return the number of updates, the last loss and the last validation result."""
        return self.view().progress

    def events(self, after: int = 0) -> list[EventView]:
        """Return the events of the job with a sequence number above ``after``, with reasons."""
        return self._api.get(f"{self._path}/events", list[EventView], params={"after": after})

    def losses(self, first: int = 0, since: float = 0.0) -> LossHistory:
        """Return the losses from update ``first`` on, and validations and rounds since a time."""
        params = {"first": first, "since": since}
        return self._api.get(f"{self._path}/losses", LossHistory, params=params)

    def trace(self) -> dict[str, Any]:
        """Return what the nodes did when, as a document in Chrome's trace format.

        Nodes that train are asked for their newest spans, which takes some seconds.
        """
        return chrome_trace(job_trace(self._api, self.id, self._clock))

    def wait(
        self, timeout: float | None = None, on_change: Callable[[JobView], None] | None = None
    ) -> JobView:
        """Wait until the job is done, failed or cancelled, and return its final view.

        ``on_change`` is called with each new view. The wait outlasts a restart of the server. Raises
        ``TimeoutError`` after ``timeout`` seconds.
        """
        deadline = None if timeout is None else self._clock() + timeout
        view = self.view()
        if on_change is not None:
            on_change(view)
        while not view.state.is_final:
            left = JOB_POLL if deadline is None else min(JOB_POLL, deadline - self._clock())
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

    def follow(
        self,
        sink: RecordSink,
        timeout: float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> JobView:
        """Wait as ``wait`` does, and pass the job's figures to a ``RunLog`` or ``Callbacks``.

        Those of the time before arrive first. A ``RunLog`` gets the times at which the server learned
        of them, and should have a folder of its own. Updates that are repeated after the loss of a node
        arrive again.
        """
        records = JobRecords(self)

        def changed(view: JobView) -> None:
            for at, record in records.of(view):
                if isinstance(sink, BackgroundSink):
                    sink.emit(record, at)
                else:
                    sink.emit(record)
            if on_change is not None:
                on_change(view)

        return self.wait(timeout, changed)

    def result(
        self,
        into: torch.nn.Module | None = None,
        *,
        folder: str | Path | None = None,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        whole: bool = False,
        raw: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Wait for the job and return the trained ``state_dict``; of a ``peft`` model, the adapter.

        It is loaded ``into`` the model if one is given, and written to ``folder`` as ``fetch`` does if
        a folder is given. ``progress`` is called with the bytes downloaded and the total. With ``ema``
        it is the moving average of the weights; ``raw``: the weights themselves. Raises
        ``JobEndedError`` with the reason if the job failed or was cancelled, and ``TimeoutError`` after
        ``timeout`` seconds.
        """
        with tempfile.TemporaryDirectory(prefix="ravnest-") as scratch:
            target = scratch if folder is None else folder
            path = self.fetch(target, timeout=timeout, progress=progress, whole=whole, raw=raw)
            state: dict[str, torch.Tensor] = _results().load_trained(path, into)
        return state

    def fetch(
        self,
        folder: str | Path,
        *,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        whole: bool = False,
        raw: bool = False,
    ) -> Path:
        """Wait for the job, write ``folder/trained_state_dict.pt`` and return its path.

        If the model is one of ``peft``, write its adapter instead, as ``adapter_model.safetensors`` and
        ``adapter_config.json``; with ``whole``, the whole model all the same. ``raw``: if the job kept
        a moving average of the weights, write the weights themselves, to ``raw_state_dict.pt``. Log a
        warning if a cluster of the job did not finish; see ``degraded``.
        """
        ended = self.wait(timeout)
        if ended.state is not JobState.DONE:
            raise ended_without_model(ended)
        if ended.degraded:
            logger.warning("job %s: %s", self.id, ended.degraded)
        path: Path = _results().fetch_trained(
            self._api, self.id, Path(folder), progress, whole=whole, raw=raw
        )
        return path

    def best(
        self,
        into: torch.nn.Module | None = None,
        *,
        folder: str | Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the ``state_dict`` of the best validation so far, without waiting for the job.

        The job needs ``keep_best``; it may be training, done, failed or cancelled. The model is loaded
        ``into`` a module and written to ``folder/best_state_dict.pt`` if these are given. Raises
        ``ServerRefusedError`` if there is none yet; ``view().best`` describes it.
        """
        with tempfile.TemporaryDirectory(prefix="ravnest-") as scratch:
            path = self.fetch_best(scratch if folder is None else folder, progress=progress)
            state: dict[str, torch.Tensor] = _results().load_trained(path, into)
        return state

    def fetch_best(
        self, folder: str | Path, *, progress: Callable[[int, int], None] | None = None
    ) -> Path:
        """Write ``folder/best_state_dict.pt``, as ``best`` returns it, and return its path."""
        path: Path = _results().fetch_best(self._api, self.id, Path(folder), progress)
        return path

    def metrics(self, timeout: float | None = None) -> dict[str, float | None]:
        """Wait for the job and return the figures of its last validation by name.

        Of a job with ``epochs=0`` they are all that it delivers. A figure that is not finite is None.
        Raises ``JobEndedError`` with the reason if the job failed or was cancelled.
        """
        ended = self.wait(timeout)
        if ended.state is not JobState.DONE:
            raise ended_without_model(ended)
        return final_figures(ended.progress)

    def partial(
        self,
        into: torch.nn.Module | None = None,
        *,
        folder: str | Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        whole: bool = False,
    ) -> PartialModel:
        """Return the newest weights at the server, without waiting for the job.

        The job may be training, waiting, failed or cancelled. The weights are those of its newest
        complete checkpoint; of several clusters, the mean. They are loaded ``into`` a module and written
        to ``folder/partial_state_dict.pt`` if these are given; of a ``peft`` model it is the adapter,
        unless ``whole``. Raises ``ServerRefusedError`` if there is none yet, with the time of the next.
        """
        partial_results = import_module("ravnest.client.partial_results")
        with tempfile.TemporaryDirectory(prefix="ravnest-") as scratch:
            target = Path(scratch if folder is None else folder)
            found: PartialModel = partial_results.fetch_partial(
                self._api, self.id, target, progress, into=into, whole=whole
            )
        return found

    def resubmit(self, *, start_from: StartFrom = "original", **changes: Any) -> JobHandle:
        """Submit a new job like this one with changed settings, and return its handle.

        ``changes`` have the names of the fields of ``Job``, such as ``epochs=10``; ``lr`` stands for
        that of ``optimizer_params``, of which only those given change. The files at the server are used
        again. ``start_from``: ``"result"``, ``"best"``, or ``"checkpoint"`` to continue an ended job.
        Raises ``JobError`` or ``ServerRefusedError`` for changes that need another upload. The new
        handle uses the connection of this one: close this one last.
        """
        changed_settings = import_module("ravnest.jobs.changed_settings")
        body = changed_settings.job_changes({**changes, "start_from": start_from})
        return JobHandle(resubmit_job(self._api, self.id, body), self._api, close=lambda: None)

    def cancel(self) -> None:
        """Cancel the job and free its providers.

        Raises ``ServerRefusedError`` if the job is done or failed.
        """
        self._api.post(f"{self._path}/cancel", None, object, idempotent=True)


def resubmit_job(api: ApiClient, job: str, changes: JobChanges) -> str:
    """Submit a job like an earlier one; return its id."""
    path = f"/api/jobs/{quote(job, safe='')}/resubmit"
    return api.post(path, changes, JobCreated, within=_COPY_SECONDS).id


def attach(job_id: str, server: str | None = None, *, token: str | None = None) -> JobHandle:
    """Return the handle of a job that was submitted before, by this or another process.

    The server is ``server``, or ``$RAVNEST_SERVER``, or the only server that this user has joined;
    ``token`` joins it. Raises ``ServerRefusedError`` if the server shows this user no such job.
    """
    handle = JobHandle(job_id, select_server(server, token, READ_ROLES).api())
    try:
        handle.view()
    except BaseException:
        handle.close()
        raise
    return handle


def _results() -> ModuleType:
    """Import the module that needs torch, which takes seconds; reading a job does not need it."""
    return import_module("ravnest.client.results")


def final_figures(progress: JobProgress) -> dict[str, float | None]:
    """Return the figures of the last validation by name; empty if there was none."""
    return progress.metrics or ({progress.metric: progress.validation} if progress.metric else {})


def ended_without_model(view: JobView) -> JobEndedError:
    """Return the error that says why a job has no trained model."""
    outcome = "was cancelled" if view.state is JobState.CANCELLED else "failed"
    hints = f"{_checkpoint_hint(view)}{_best_hint(view)}"
    return JobEndedError(f"job {view.id} {outcome}: {view.reason}{hints}")


def _best_hint(view: JobView) -> str:
    """Return how to fetch the best model of a job; empty if the server has none."""
    best = view.best
    if best is None:
        return ""
    return (
        f"\nIts best model ({best.metric} {best.value:.4f} after epoch {best.epoch}) is at the server: "
        f"`ravnest fetch {view.id} --best`"
    )


def _checkpoint_hint(view: JobView) -> str:
    """Return how to continue from the last checkpoint of a job; empty if the server has none."""
    if view.saved_update is None:
        return ""
    return (
        f"\nThe server has its checkpoint of update {view.saved_update}: continue from it with `ravnest "
        f"submit MODULE:FUNCTION --resume {view.id}`, with other settings if you like, or download its "
        f"weights with `ravnest fetch {view.id} --partial`"
    )
