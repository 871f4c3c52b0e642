"""``ravnest demo``: a server, providers and a job on this machine, in one command."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.console import CommandLog, job_status_line, out, progress_bars
from ravnest.cli.options import Quiet
from ravnest.cli.system_errors import check_writable
from ravnest.client.digits import accuracy, digits, digits_job
from ravnest.client.handle import JobHandle, ended_without_model
from ravnest.client.local_providers import LocalProviders
from ravnest.client.results import load_trained
from ravnest.client.submission import upload_job
from ravnest.errors import JobEndedError
from ravnest.http.api import ApiClient
from ravnest.http.credentials import join
from ravnest.jobs.job import Job
from ravnest.provider.sandbox.choice import usable_sandbox
from ravnest.provider.signals import raised_interrupts
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import AssignmentView, JobState, JobView
from ravnest.server.http.runner import serve

_TIME_LIMIT = 900.0
"""Seconds that the demo may take."""
_PROVIDER_LIFETIME = "--hours=0.3"
"""Option that ends the providers even if the demo is killed and cannot stop them."""
_CHECK_SECONDS = 2.0
"""Seconds between checks that the providers are running."""
_KILL_EPOCHS = 40
"""Epochs at least, so that there is something left to train after the loss of a provider."""


def demo(
    providers: Annotated[int, typer.Option(min=1, max=8, help="Number of providers to start.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 10,
    folder: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder for the trained model.")
    ] = Path("ravnest-demo"),
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill a provider while it trains; a spare takes its place.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run a server, providers and a job on this machine.

    The providers train a small network. Everything is stopped and removed at the end, except for the
    trained model.
    """
    check_writable(folder)
    console = out(quiet=quiet)
    train, validation, description = digits()
    with raised_interrupts(), ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ravnest-demo-")))
        server = stack.enter_context(serve(folder=scratch / "server", host="127.0.0.1", port=0))
        console.print(f"1. A server runs at {server.url}, as with `ravnest serve`.")
        joining = providers + kill  # the last one is the spare
        options = {"server": server.url, "token": server.token(ApiRole.PROVIDER, uses=joining)}
        console.print(f"2. {joining} providers join it, as with `ravnest provide --server URL`:")
        running = stack.enter_context(LocalProviders(scratch, options, partial(_show_line, console)))
        offered = ("--ram=1", "--cores=1", _PROVIDER_LIFETIME, _sandbox(console))
        for number in range(joining):
            running.start(f"provider-{number}", *offered)
        member = join(server.url, server.token(ApiRole.REQUESTER), "demo")
        api = stack.enter_context(member.api())
        console.print(
            f"3. A job is submitted, as with `ravnest submit job:job`: a CNN on {description}."
        )
        if kill and epochs < _KILL_EPOCHS:
            console.print(
                f"   With --kill it trains {_KILL_EPOCHS} epochs, not {epochs}: there must be something "
                "left to train after the kill."
            )
            epochs = _KILL_EPOCHS
        job = digits_job(train, validation, epochs=epochs, providers=providers)
        handle = _submit(console, api, job)
        console.print("4. The server splits the model and ships the stages; the providers train:")
        _follow(console, handle, running, _Kill(console, handle, running) if kill else None)
        path = handle.fetch(folder)
        load_trained(path, job.model)
    console.print("5. The server and the providers have stopped. The trained model:")
    out().print(f"accuracy {accuracy(job.model, validation):.1%} on data that was held out")
    out().print(f"{path}")


def _sandbox(console: Console) -> str:
    """Return the option of providers that train only the demo's own model, which needs no sandbox."""
    found = usable_sandbox()
    if not isinstance(found, str):
        return "--sandbox=auto"
    console.print(
        f"   They run the demo's own model without a sandbox, because this machine has none: {found}."
    )
    return "--sandbox=off"


def _submit(console: Console, api: ApiClient, job: Job) -> JobHandle:
    with progress_bars(console) as bars:
        return JobHandle(upload_job(api, job, bars.update), api)


@dataclass
class _Kill:
    """The kill of a provider that trains, and the recovery of its job."""

    console: Console
    handle: JobHandle
    providers: LocalProviders
    _killed: float | None = None
    """Time of the kill."""
    _is_told: bool = False

    def see(self, view: JobView) -> None:
        """Kill a provider once it may be killed, and tell when training goes on."""
        now = time.monotonic()
        if self._killed is None and (victim := _victim(view)) is not None:
            self._killed = now
            self.console.print(f"   {victim} is killed now (SIGKILL), as if it had lost its power.")
            self.providers.kill(victim)
        elif self._killed is not None and view.recoveries and not self._is_told:
            self._is_told = True
            told = [each.reason for each in self.handle.events() if each.kind == "recovery"]
            self.console.print(f"   {now - self._killed:.1f} s after the kill: {told[-1]}.")

    def end(self) -> None:
        """Say so if the job was too short."""
        if self._killed is None:
            self.console.print("   The job was done before a provider could be killed: raise --epochs.")


def _follow(console: Console, handle: JobHandle, providers: LocalProviders, kill: _Kill | None) -> None:
    """Show the job until it is done; raise an error if the job or a provider ends early."""
    deadline = time.monotonic() + _TIME_LIMIT
    with job_status_line(CommandLog(console)) as line:

        def show(view: JobView) -> None:
            line.show(view)
            if kill is not None:
                kill.see(view)

        while time.monotonic() < deadline:
            providers.check()
            try:
                ended = handle.wait(_CHECK_SECONDS, show)
            except TimeoutError:
                continue
            if ended.state is not JobState.DONE:
                raise ended_without_model(ended)
            if kill is not None:
                kill.end()
            return
    raise JobEndedError(f"the job is not done after {_TIME_LIMIT:g} s: {handle.view().reason}")


def _victim(view: JobView) -> str | None:
    """Return the provider to kill: that of the second stage, once a checkpoint is there."""
    if view.state is not JobState.TRAINING or view.checkpoint is None:
        return None
    stages = sorted((each for each in view.assignments if each.phase == "training"), key=_by_node)
    return stages[min(1, len(stages) - 1)].provider_name if stages else None


def _by_node(assignment: AssignmentView) -> int:
    return assignment.node


def _show_line(console: Console, name: str, line: str) -> None:
    console.print(f"   {name} | {line}")
