"""``ravnest submit``: hand in a training."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from ravnest.cli.console import bars, err, out
from ravnest.cli.fetch import Out, follow_and_fetch
from ravnest.cli.options import Server, Token
from ravnest.cli.target import TargetError, call_target
from ravnest.client.handle import JobHandle
from ravnest.client.local_server import host_server
from ravnest.client.server_selection import choose
from ravnest.client.submission import hand_in
from ravnest.jobs.job import Job


def submit(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="A function that returns a ravnest.Job."),
    ],
    server: Server = None,
    token: Token = None,
    serve_here: Annotated[
        bool, typer.Option("--serve-here", help="Be the server, too, until the job has ended.")
    ] = False,
    host: Annotated[
        str,
        typer.Option(help="With --serve-here: where to listen; 0.0.0.0 for other machines."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --serve-here: the port; 0 takes a free one.")] = 0,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Print the job's id and go; `ravnest fetch` later."),
    ] = False,
    folder: Out = None,
) -> None:
    """Have a model trained; shows how it goes, and brings the trained model home.

    Ctrl-C leaves the job to the server: `ravnest status`, `ravnest fetch`, `ravnest cancel`.
    """
    if serve_here and detach:
        raise typer.BadParameter("the server would end with this command", param_hint="--detach")
    if serve_here and server:
        raise typer.BadParameter("there is one server", param_hint="--serve-here with --server")
    with ExitStack() as opened:
        console = err()
        if serve_here:
            member, invitation = opened.enter_context(host_server(host=host, port=port))
            console.print(f"serving at {member.url}; providers join with\n  {invitation}")
        else:
            member = choose(server, token)
        api = opened.enter_context(member.api())
        api.get("/api/health", object)  # before the user's module is loaded, which may take time
        job = load_job(target)
        with bars(console) as shown:
            handle = JobHandle(hand_in(api, job, shown.tell), api)
        if detach:
            out().print(handle.id)
            return
        console.print(f"submitted {handle.id}")
        follow_and_fetch(handle, folder)


def load_job(target: str) -> Job:
    """The job that the user's function returns."""
    made = call_target(target)
    if not isinstance(made, Job):
        raise TargetError(f"{target} must return a ravnest.Job, got {type(made).__name__}")
    return made
