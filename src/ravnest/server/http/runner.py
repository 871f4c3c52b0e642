"""Running a server: in a thread of somebody else's process, or as a process of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ravnest.errors import ServerError
from ravnest.schemas.auth import ApiRole
from ravnest.server.auth.tokens import DEFAULT_HOURS, AuthService
from ravnest.server.db.database import Database
from ravnest.server.folder import ServerAddress, ServerFolder, write_private
from ravnest.server.http.app import create_app
from ravnest.server.http.listener import host_to_show, listen, names_of, needs_tls, url_of
from ravnest.server.server import Server
from ravnest.server.settings import ServerSettings

DEFAULT_PORT = 7100
DEFAULT_FOLDER = "ravnest_server"
_GRACE_SECONDS = 5
_START_SECONDS = 60.0


@dataclass(frozen=True)
class RunningServer:
    """A server that is up."""

    url: str
    server: Server
    fingerprint: str
    """Of its authority; empty where it speaks plain HTTP."""

    def token(self, role: ApiRole | str, *, uses: int | None = 1, hours: float = DEFAULT_HOURS) -> str:
        """A token to join it with; ``uses=None``: as often as wanted until it expires."""
        made = self.server.trust.create_token(ApiRole(role), self.fingerprint, uses=uses, hours=hours)
        return str(made)

    @property
    def admin_credential(self) -> str:
        """What the owner of the folder is known by."""
        return self.server.folder.admin.read_text(encoding="ascii").strip()


@contextmanager
def serve(
    folder: str | Path = DEFAULT_FOLDER,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    public_names: Sequence[str] = (),
    tls: bool | None = None,
    settings: ServerSettings | None = None,
) -> Iterator[RunningServer]:
    """An intermediary server while the block runs, in a thread of this process.

    On loopback it speaks plain HTTP, elsewhere HTTPS with a certificate of its own authority;
    ``tls=True`` asks for that on loopback too. Port 0 is any that is free.
    """
    with _prepared(folder, host, port, public_names, tls, settings) as (running, loop, listener):
        thread = threading.Thread(target=loop.run_in_thread, args=(listener,), name="ravnest-server")
        thread.start()
        try:
            loop.await_start()
            yield running
        finally:
            loop.should_exit = True
            thread.join()


def serve_in_foreground(
    announce: Callable[[RunningServer], None],
    folder: str | Path = DEFAULT_FOLDER,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    public_names: Sequence[str] = (),
    tls: bool | None = None,
) -> None:
    """Run a server until Ctrl-C or SIGTERM; ``announce`` is called once it listens."""
    with _prepared(folder, host, port, public_names, tls, None) as (running, loop, listener):
        loop.on_start = lambda: announce(running)  # by then a signal is a wish to stop
        try:
            asyncio.run(loop.serve(sockets=[listener]))
        except KeyboardInterrupt:  # raised again by uvicorn once everything is closed
            return


def create_token(
    folder: Path, role: ApiRole, *, uses: int | None = 1, hours: float = DEFAULT_HOURS
) -> tuple[str, str]:
    """The address of a folder's server, and a token for it; the server may be running or not."""
    place = ServerFolder(folder)
    address = place.address()
    store = Database(place.database)
    try:
        store.open()
        made = AuthService(store, place).create_token(role, address.fingerprint, uses=uses, hours=hours)
    finally:
        store.close()
    return address.url, str(made)


class _QuietProtocol(H11Protocol):
    """HTTP without uvicorn's own access log, which would hold the tokens of login links.

    To switch that log off by its name would do so for other servers in this process too, and whoever
    configures logging could switch it on again.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.access_log = False


class _Loop(uvicorn.Server):
    """Uvicorn, which tells when it has started and lets nobody wait when it stops."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self.on_start: Callable[[], None] = lambda: None
        self._ravnest = server
        self._started = threading.Event()
        self._failure: BaseException | None = None

    def run_in_thread(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self.serve(sockets=[listener]))
        except BaseException as error:  # it is raised where the server was started
            self._failure = error
        finally:
            self._started.set()

    def await_start(self) -> None:
        if not self._started.wait(_START_SECONDS) or self._failure is not None or not self.started:
            raise ServerError(f"the server did not start: {self._failure or 'see its log'}")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()
        self._started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ravnest.wakes.close()
        await super().shutdown(sockets)


@contextmanager
def _prepared(
    folder: str | Path,
    host: str,
    port: int,
    public_names: Sequence[str],
    tls: bool | None,
    settings: ServerSettings | None,
) -> Iterator[tuple[RunningServer, _Loop, socket.socket]]:
    if tls is False and needs_tls(host):
        raise ServerError(f"{host} can be reached by others: without TLS they could read every secret")
    secure = needs_tls(host) if tls is None else tls
    server = Server(Path(folder), settings=settings, tls=secure)
    with server.opened(), listen(host, port) as listener:
        config = uvicorn.Config(
            create_app(server),
            http=_QuietProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        if secure:
            config.ssl_certfile, config.ssl_keyfile = _certificate(server, host, public_names)
        shown = host_to_show(host, public_names)
        url = url_of(shown, listener.getsockname()[1], tls=secure)
        fingerprint = server.trust.fingerprint if secure else ""
        server.folder.write_address(ServerAddress(url=url, fingerprint=fingerprint))
        yield RunningServer(url, server, fingerprint), _Loop(config, server), listener


def _certificate(server: Server, host: str, public_names: Sequence[str]) -> tuple[Path, Path]:
    """A new one at each start, for the names that the machine has now."""
    identity = server.trust.server_identity(names_of(host, public_names))
    certificate, key = (server.folder.authority / name for name in ("server.pem", "server.key"))
    write_private(certificate, identity.certificate)
    write_private(key, identity.key)
    return certificate, key
