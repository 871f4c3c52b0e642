"""A server in the requester's own process, for the duration of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ravnest.client.server_selection import user_name
from ravnest.http.credentials import Membership, join
from ravnest.schemas.auth import ApiRole
from ravnest.server.http.runner import DEFAULT_FOLDER, serve


@contextmanager
def host_server(
    folder: str | Path = DEFAULT_FOLDER, host: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[Membership, str]]:
    """Run a server in the context; yield our membership and the command with which providers join.

    Jobs that an earlier server left in ``folder`` continue.
    """
    with serve(folder=folder, host=host, port=port) as running:
        member = join(running.url, running.token(ApiRole.REQUESTER), user_name())
        token = running.token(ApiRole.PROVIDER, uses=None)
        yield member, f"ravnest provide --server {running.url} --token {token}"
