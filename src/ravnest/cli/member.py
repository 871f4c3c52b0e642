"""``ravnest member``: list the members of a server, and revoke their credentials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ravnest.cli.console import local_time, out, print_json, print_table
from ravnest.cli.options import Json
from ravnest.errors import ServerUnreachableError
from ravnest.http.api import ApiClient
from ravnest.http.retry import NO_RETRY
from ravnest.schemas.auth import MemberView
from ravnest.server.auth.tokens import AuthService
from ravnest.server.db.database import Database
from ravnest.server.folder import ServerFolder
from ravnest.server.http.runner import DEFAULT_FOLDER

app = typer.Typer(
    help="List the members of a server, and revoke credentials.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folder = Annotated[Path, typer.Option(help="Folder of the server.")]


@app.command("list")
def list_members(folder: Folder = Path(DEFAULT_FOLDER), as_json: Json = False) -> None:
    """Show who joined the server. Run this on the server's machine."""
    members = _members(ServerFolder(folder))
    if as_json:
        print_json(members)
        return
    table = Table("MEMBER", "ROLE", "NAME", "JOINED", "CREDENTIAL", box=None)
    for each in members:
        table.add_row(each.id, each.role, each.name, local_time(each.created), _validity(each))
    print_table(table)


@app.command()
def revoke(
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="Id; see `ravnest member list`.")],
    folder: Folder = Path(DEFAULT_FOLDER),
) -> None:
    """End the credential of a member now: a provider leaves its job.

    Run this on the server's machine.
    """
    found = ServerFolder(folder)
    try:
        with _admin(found) as api:
            api.delete(f"/api/members/{member}")
    except ServerUnreachableError:
        with _stopped_server(found) as auth:
            auth.revoke(member)
    out().print(f"the credential of {member} was revoked")


def _members(folder: ServerFolder) -> list[MemberView]:
    try:
        with _admin(folder) as api:
            return api.get("/api/members", list[MemberView])
    except ServerUnreachableError:
        with _stopped_server(folder) as auth:
            return auth.members()


def _admin(folder: ServerFolder) -> ApiClient:
    """Return a client with the credential of the folder's owner."""
    address = folder.address()
    authority = (folder.authority / "authority.pem").read_text() if address.fingerprint else None
    credential = folder.admin.read_text(encoding="ascii").strip()
    return ApiClient(address.url, credential, authority, retry=NO_RETRY)


@contextmanager
def _stopped_server(folder: ServerFolder) -> Iterator[AuthService]:
    """Yield the members of a server that does not run."""
    db = Database(folder.database)
    try:
        db.open()
        yield AuthService(db, folder)
    finally:
        db.close()


def _validity(member: MemberView) -> str:
    if member.expires is None:
        return "does not expire"
    return f"{'until' if member.active else 'ended'} {local_time(member.expires)}"
