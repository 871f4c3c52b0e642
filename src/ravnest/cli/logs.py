"""``ravnest logs``: the events of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from ravnest.cli.console import event_line, out, print_json_line, warn_of_degraded
from ravnest.cli.options import JobId, Server, Token
from ravnest.client.handle import JobHandle, ended_without_model
from ravnest.client.server_selection import READ_ROLES, select_server
from ravnest.schemas.jobs import JobState, JobView


def logs(
    job: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")
    ] = False,
    server: Server = None,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
) -> None:
    """Show the events of a job and their reasons."""
    show = print_json_line if as_json else lambda event: out().print(event_line(event))
    last = 0
    with JobHandle(job, select_server(server, token, READ_ROLES).api()) as handle:

        def show_new(_: JobView | None = None) -> None:
            nonlocal last
            while events := handle.events(after=last):
                for event in events:
                    show(event)
                last = events[-1].sequence

        if not follow:
            show_new()
            return
        ended = handle.wait(on_change=show_new)
        show_new()
    if ended.state is not JobState.DONE:
        raise ended_without_model(ended)
    warn_of_degraded(ended)
