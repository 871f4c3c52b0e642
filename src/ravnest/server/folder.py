"""The server's folder: paths, lock and private files."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from ravnest.errors import ServerError
from ravnest.host import make_private
from ravnest.store.files import write_json


class ServerAddress(BaseModel):
    """Address of a folder's server, for commands on the same machine."""

    url: str
    fingerprint: str
    """Fingerprint of the server's authority; empty with plain HTTP."""


class ServerFolder:
    """Paths of the server's files; only the folder's owner can read them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "server.sqlite"
        self.artifacts = path / "artifacts"
        self.authority = path / "authority"
        self.job_authorities = path / "authorities"
        self.relay_key = self.authority / "relay.key"
        self.page_key = self.authority / "page.key"
        self.scratch = path / "scratch"
        self.ballast = path / "ballast"
        self.admin = path / "admin.credential"
        self._address = path / "server.json"

    def make(self) -> None:
        """Create the folders that are missing; nobody but their owner can use them afterwards."""
        for folder in (self.path, self.authority, self.job_authorities):
            make_private(folder)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While in here no other server uses the folder; the system lets go of it if we die."""
        self.make()
        lock = FileLock(self.path / "server.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ServerError(
                f"another server uses {self.path}: stop it first, or take another folder"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def write_address(self, address: ServerAddress) -> None:
        """Write the server's address for commands on this machine."""
        write_json(self._address, address.model_dump())

    def address(self) -> ServerAddress:
        """Return the server's last address; raise ``ServerError`` if no server was ever started here."""
        try:
            return ServerAddress.model_validate_json(self._address.read_bytes())
        except FileNotFoundError:
            raise ServerError(
                f"{self.path} is not the folder of a server: start one with `ravnest serve --folder "
                f"{shlex.quote(str(self.path))}`, or pass the right folder"
            ) from None
        except ValidationError as error:
            raise ServerError(f"{self._address} is damaged: start the server again") from error


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically; only its owner can read it, from the moment it is created."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
