"""``ravnest demo``: a server, providers and a job on this machine, in one command."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ravnest.cli.console import bars, job_line, out
from ravnest.client.digits import accuracy, digits, digits_job
from ravnest.client.handle import JobHandle, ended_without_model
from ravnest.client.local_providers import LocalProviders
from ravnest.client.results import load_trained
from ravnest.client.submission import hand_in
from ravnest.errors import JobEndedError
from ravnest.http.api import ApiClient
from ravnest.http.credentials import join
from ravnest.jobs.job import Job
from ravnest.provider.signals import interrupts
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState
from ravnest.server.http.runner import serve

_LIMIT = 900.0
"""Seconds that a demo may take."""
_HOURS = "--hours=0.3"
"""Providers end by then, even if the demo is killed and cannot end them."""
_LOOK = 2.0
"""Seconds after which to see whether the providers still live."""


def demo(
    providers: Annotated[int, typer.Option(min=1, max=8, help="How many providers to start.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Of the training.")] = 10,
    folder: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where the trained model is kept.")
    ] = Path("ravnest-demo"),
) -> None:
    """See it all work on this machine, in one command.

    Starts a server and some providers, has them train a small network, and ends them. Only the
    trained model is kept.
    """
    console = out()
    train, validation, what = digits()
    with interrupts(_interrupt), ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ravnest-demo-")))
        server = opened.enter_context(serve(folder=scratch / "server", host="127.0.0.1", port=0))
        console.print(f"1. A server runs at {server.url}, as with `ravnest serve`.")
        invitation = {"server": server.url, "token": server.token(ApiRole.PROVIDER, uses=providers)}
        console.print(f"2. {providers} providers join it, as with `ravnest provide`:")
        show = partial(_show_line, console)
        neighbours = opened.enter_context(LocalProviders(scratch, invitation, show))
        for number in range(providers):
            neighbours.start(f"provider-{number}", "--ram=1", "--cores=1", _HOURS)
        member = join(server.url, server.token(ApiRole.REQUESTER), "demo")
        api = opened.enter_context(member.api())
        console.print(f"3. A job is submitted, as with `ravnest submit`: a CNN that learns {what}.")
        job = digits_job(train, validation, epochs=epochs, providers=providers)
        handle = _submit(console, api, job)
        console.print("4. The server splits the model, ships the stages, and the providers train it:")
        _follow(console, handle, neighbours)
        path = handle.fetch(folder)
        load_trained(path, job.model)
    console.print("5. All that ran is ended, and the trained model is here:")
    console.print(f"accuracy {accuracy(job.model, validation):.1%} on data that it has not seen")
    console.print(f"{path}")


def _submit(console: Console, api: ApiClient, job: Job) -> JobHandle:
    with bars(console) as shown:
        return JobHandle(hand_in(api, job, shown.tell), api)


def _follow(console: Console, handle: JobHandle, neighbours: LocalProviders) -> None:
    """Show the job until it is done; an error as soon as something ended that should not have."""
    deadline = time.monotonic() + _LIMIT
    with job_line(console) as line:
        while time.monotonic() < deadline:
            neighbours.check()
            try:
                ended = handle.wait(_LOOK, line.show)
            except TimeoutError:
                continue
            if ended.state is not JobState.DONE:
                raise ended_without_model(ended)
            return
    raise JobEndedError(f"the job is not done after {_LIMIT:g} s: {handle.view().reason}")


def _show_line(console: Console, name: str, line: str) -> None:
    console.print(f"   {name} | {line}")


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt
