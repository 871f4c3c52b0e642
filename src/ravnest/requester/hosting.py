"""A server in the requester's own process, for as long as a job takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ravnest.api.trust import ApiRole
from ravnest.client.joining import Membership, join
from ravnest.requester.choosing import own_name
from ravnest.server.serving import serve

PROVIDERS = 1000
"""May join with the token of an invitation."""
HOURS = 24.0
"""An invitation is good for so long."""


@contextmanager
def host_server(
    folder: Path | None = None, host: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[Membership, str]]:
    """Serve while the context lasts: our membership, and the command with which providers join."""
    with serve(folder=folder, host=host, port=port) as running:
        member = join(running.url, running.token(ApiRole.REQUESTER), own_name())
        token = running.token(ApiRole.PROVIDER, uses=PROVIDERS, hours=HOURS)
        yield member, f"ravnest provide --server {running.url} --token {token}"
