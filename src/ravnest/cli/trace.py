"""``ravnest trace``: what each node of a run did when, as a file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ravnest.cli.console import out
from ravnest.cli.options import Server, Token
from ravnest.client.server_selection import SUBMIT_ROLES, select_server
from ravnest.client.traces import job_trace
from ravnest.errors import SettingsError
from ravnest.store.files import write_json
from ravnest.tracing.chrome import chrome_trace
from ravnest.tracing.files import read_traces


def trace(
    run: Annotated[
        str,
        typer.Argument(
            metavar="JOB|FOLDER",
            help="Job of a server, or the folder of `ravnest launch SCRIPT --trace FOLDER`.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("trace.json"),
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Only the last seconds; default: all there is.")
    ] = None,
    server: Server = None,
    token: Token = None,
) -> None:
    """Write what each node of a run did when, for Perfetto.

    Open the file at https://ui.perfetto.dev. Of a job that trains, the nodes are asked for their last
    8,192 spans; of one that has ended, the server has the first and the last 2,048 of each node. Only
    the owner and admins may read them.
    """
    folder = Path(run)
    if folder.is_dir():
        found = read_traces(folder)
    else:
        with select_server(server, token, SUBMIT_ROLES).api() as api:
            found = job_trace(api, run)
    if not any(each.spans for each in found):
        raise SettingsError(
            f"{run} has no trace: its nodes have not trained, or run an earlier version of Ravnest"
        )
    document = chrome_trace([each for each in found if each.spans], seconds)
    write_json(output, document, compact=True)
    spans = sum(each["ph"] == "X" for each in document["traceEvents"])
    clocks = document["otherData"]["clocks"]
    out().print(f"{spans} spans of {len(clocks)} nodes in {output}; open it at https://ui.perfetto.dev")
    for title, clock in clocks.items():
        out().print(f"  {title}: {clock}", markup=False, highlight=False)
