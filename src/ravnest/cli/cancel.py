"""``ravnest cancel``: end a job."""

from __future__ import annotations

from ravnest.cli.console import out
from ravnest.cli.options import JobId, Server, Token
from ravnest.client.handle import JobHandle
from ravnest.client.server_selection import choose


def cancel(job: JobId, server: Server = None, token: Token = None) -> None:
    """End a job; its providers become free for others."""
    with JobHandle(job, choose(server, token).api()) as handle:
        handle.cancel()
    out().print(f"cancelled {job}")
