"""``ravnest cancel``: cancel a job."""

from __future__ import annotations

from ravnest.cli.console import out
from ravnest.cli.options import JobId, Server, Token
from ravnest.client.handle import JobHandle
from ravnest.client.server_selection import select_server


def cancel(job: JobId, server: Server = None, token: Token = None) -> None:
    """Cancel a job and free its providers."""
    with JobHandle(job, select_server(server, token).api()) as handle:
        handle.cancel()
    out().print(f"cancelled {job}")
