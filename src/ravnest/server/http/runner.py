"""Runs a server: in a thread of the calling process, or in the foreground."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from ravnest.deadlines import SERVER_STOP
from ravnest.errors import RelayError, ServerError
from ravnest.host import raise_file_limit
from ravnest.relay.limits import RelayLimits
from ravnest.relay.process import RelayProcess
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import EventView
from ravnest.server.auth.tokens import DEFAULT_HOURS, AuthService
from ravnest.server.db.database import Database
from ravnest.server.event_log import EventLog, log_line
from ravnest.server.folder import ServerAddress, ServerFolder, write_private
from ravnest.server.http.app import create_app
from ravnest.server.http.connections import CountedListener, limited_protocol
from ravnest.server.http.listener import (
    certificate_names,
    listen,
    needs_tls,
    public_host,
    relay_hosts,
    url_of,
)
from ravnest.server.reachability.relays import OWN_RELAY
from ravnest.server.server import Server
from ravnest.server.settings import ServerSettings
from ravnest.types import Address

DEFAULT_PORT = 7100
DEFAULT_FOLDER = "ravnest_server"
_START_SECONDS = 60.0
_LAST_PORT = 65535
_LONGEST_HEADER = 16 << 10
_COLLECTED_AFTER = (10_000, 10, 100)
"""Objects after which the garbage collector looks at the newest ones, and how many such looks precede
one at older ones, and at all. With 1000 providers, a look at all objects but those of modules takes
0.1 s of CPU time, and came about every ten seconds by Python's default; one at the newest takes 5 to
20 ms, once in some seconds."""
_SWITCH_SECONDS = 0.0005
"""Time for which a thread may compute while others wait; Python's default is ten times as long."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningServer:
    """A running server."""

    url: str
    server: Server
    fingerprint: str
    """Fingerprint of the server's authority; empty with plain HTTP."""

    def token(self, role: ApiRole | str, *, uses: int | None = 1, hours: float = DEFAULT_HOURS) -> str:
        """Create a join token; ``uses=None`` means unlimited uses until it expires."""
        made = self.server.auth.create_token(ApiRole(role), self.fingerprint, uses=uses, hours=hours)
        return str(made)

    @property
    def relay_addresses(self) -> list[str]:
        """Addresses of the relay that the server runs itself; empty without one."""
        own = self.server.relay_service.live().get(OWN_RELAY)
        return [] if own is None else list(own.addresses)

    @property
    def admin_credential(self) -> str:
        """Credential of the folder's owner."""
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
    relay: bool | None = None,
    relay_port: int | None = None,
) -> Iterator[RunningServer]:
    """Run an intermediary server in a thread of this process while the block runs.

    It uses plain HTTP on loopback, and HTTPS with a certificate of its own authority elsewhere;
    ``tls=True`` selects HTTPS on loopback too. Port 0 means any free port. Outside of loopback it runs
    a relay as well, at the next port, unless ``relay=False``. Raise ``ServerError`` if the server cannot
    start.
    """
    with (
        _prepared(folder, host, port, public_names, tls, settings) as (running, loop, listener),
        _with_relay(running, host, public_names, relay, relay_port),
    ):
        thread = threading.Thread(target=loop.run_in_thread, args=(listener,), name="ravnest-server")
        thread.start()
        try:
            loop.await_start()
            yield running
        finally:
            loop.should_exit = True
            thread.join()


def serve_in_foreground(  # noqa: PLR0913 - each an option of the command
    announce: Callable[[RunningServer], None],
    folder: str | Path = DEFAULT_FOLDER,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    public_names: Sequence[str] = (),
    tls: bool | None = None,
    relay: bool | None = None,
    relay_port: int | None = None,
    settings: ServerSettings | None = None,
    log: Callable[[str], None] | None = None,
    shown: Callable[[EventView, str], str | None] = log_line,
) -> None:
    """Run a server until Ctrl-C or SIGTERM; ``announce`` is called once it listens.

    ``log`` is called with a line for each thing that happens, from a thread of its own; ``shown``
    returns the line. Return after an orderly stop; raise ``ServerError`` if the server cannot start.
    """
    prepared = _prepared(folder, host, port, public_names, tls, settings, announce)
    with (
        prepared as (running, loop, listener),
        nullcontext() if log is None else EventLog(running.server.db, log, shown).running(),
        _with_relay(running, host, public_names, relay, relay_port),
        suppress(KeyboardInterrupt),  # raised after an orderly stop
    ):
        raise_file_limit()
        avoid_pauses()
        asyncio.run(loop.serve(sockets=[listener]))
        loop.check_start()


def avoid_pauses() -> None:
    """Keep the requests of this process from waiting; for a process that only runs a server.

    The garbage collector looks at all objects from time to time, while everything else stands still.
    Most of them belong to imported modules and stay until the end, so that it leaves out those that
    exist now; and it looks at those of connections and caches rarely. A thread that computes lets others
    run after a shorter time than usual: a heartbeat hands over to SQLite many times, and waits for its
    turn each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTED_AFTER)
    sys.setswitchinterval(_SWITCH_SECONDS)


def create_token(
    folder: Path, role: ApiRole, *, uses: int | None = 1, hours: float = DEFAULT_HOURS
) -> tuple[str, str]:
    """Return the URL of a folder's server and a new token for it; the server need not be running."""
    server_folder = ServerFolder(folder)
    address = server_folder.address()
    db = Database(server_folder.database)
    try:
        db.open()
        auth = AuthService(db, server_folder)
        made = auth.create_token(role, address.fingerprint, uses=uses, hours=hours)
    finally:
        db.close()
    return address.url, str(made)


class _Loop(uvicorn.Server):
    """Uvicorn with a start event; waiting requests are answered when it stops."""

    def __init__(self, config: uvicorn.Config, server: Server, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start  # signal handlers are installed by then
        self._ravnest = server
        self._started = threading.Event()
        self._failure: BaseException | None = None

    def run_in_thread(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self.serve(sockets=[listener]))
        except BaseException as error:  # raised by ``await_start``
            self._failure = error
        finally:
            self._started.set()

    def await_start(self) -> None:
        self._started.wait(_START_SECONDS)
        self.check_start()

    def check_start(self) -> None:
        if self._failure is not None or not self.started:
            raise ServerError(f"the server did not start: {self._failure or 'see its log'}")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self.config.is_ssl:  # uvicorn has no setting for it, and asyncio waits for a minute
            seconds = self._ravnest.settings.connections.header_seconds
            loop.create_server = partial(  # type: ignore[method-assign]
                loop.create_server, ssl_handshake_timeout=seconds
            )
        await super().startup(sockets)
        self._on_start()
        self._started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ravnest.notifications.close()
        await super().shutdown(sockets)


@contextmanager
def _prepared(
    folder: str | Path,
    host: str,
    port: int,
    public_names: Sequence[str],
    tls: bool | None,
    settings: ServerSettings | None,
    announce: Callable[[RunningServer], None] = lambda _: None,
) -> Iterator[tuple[RunningServer, _Loop, socket.socket]]:
    if tls is False and needs_tls(host):
        raise ServerError(
            f"other machines can reach {host}: without TLS all secrets would be readable on the network"
        )
    secure = needs_tls(host) if tls is None else tls
    server = Server(Path(folder), settings=settings, tls=secure)
    with server.opened(), CountedListener(listen(host, port), server.connections) as listener:
        url = url_of(public_host(host, public_names), listener.getsockname()[1], tls=secure)
        fingerprint = server.auth.fingerprint if secure else ""
        running = RunningServer(url, server, fingerprint)
        certificate, key = _certificate(server, host, public_names) if secure else (None, None)
        config = uvicorn.Config(
            create_app(server),
            ssl_certfile=certificate,
            ssl_keyfile=key,
            http=limited_protocol(server.connections, server.settings.connections, listener),
            h11_max_incomplete_event_size=_LONGEST_HEADER,
            ws="none",
            lifespan="on",
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(SERVER_STOP),
        )
        server.folder.write_address(ServerAddress(url=url, fingerprint=fingerprint))
        yield running, _Loop(config, server, partial(announce, running)), listener


@contextmanager
def _with_relay(
    running: RunningServer,
    host: str,
    public_names: Sequence[str],
    wanted: bool | None,
    port: int | None,
) -> Iterator[None]:
    """Run a relay beside the server; without an order to do so, only outside of loopback."""
    if not (needs_tls(host) if wanted is None else wanted):
        yield
        return
    service = running.server.relay_service
    listen_at = Address(host, _next_port(running.url) if port is None else port)
    jobs = frozenset(service.reply().running_jobs)
    relay = RelayProcess(listen_at, service.public_key, RelayLimits(), jobs)
    try:
        relay.start()
    except RelayError as error:
        if wanted is None:
            _log.warning("%s; providers that cannot be dialled are not used", error)
            yield
            return
        raise ServerError(f"{error}; choose another port with --relay-port") from error
    try:
        hosts = relay_hosts(host, public_names)
        service.put_own(relay, [Address(each, relay.address.port) for each in hosts])
        yield
    finally:
        relay.stop()


def _next_port(url: str) -> int:
    port = urlsplit(url).port or 0
    return port + 1 if port < _LAST_PORT else 0


def _certificate(server: Server, host: str, public_names: Sequence[str]) -> tuple[Path, Path]:
    """Write a new certificate for the names that the machine has now; return its path and the key's."""
    identity = server.auth.server_identity(certificate_names(host, public_names))
    certificate, key = (server.folder.authority / name for name in ("server.pem", "server.key"))
    write_private(certificate, identity.certificate)
    write_private(key, identity.key)
    return certificate, key
