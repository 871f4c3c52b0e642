"""``ravnest member``, and tokens that are not on the command line."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ravnest.cli import member
from ravnest.cli.options import Token
from ravnest.schemas.auth import ApiRole
from ravnest.server.folder import ServerAddress
from ravnest.server.http.runner import serve
from ravnest.server.server import Server

runner = CliRunner()


def joined(server: Server, name: str) -> str:
    token = server.auth.create_token(ApiRole.PROVIDER, "")
    return server.auth.join(token.secret, name, "127.0.0.1").id


def listed(folder: Path) -> dict[str, bool]:
    result = runner.invoke(member.app, ["list", "--json", "--folder", str(folder)])
    assert result.exit_code == 0, result.output
    return {each["id"]: each["active"] for each in json.loads(result.output)}


def revoke(folder: Path, who: str) -> None:
    result = runner.invoke(member.app, ["revoke", who, "--folder", str(folder)])
    assert result.exit_code == 0, result.output


def test_members_of_a_running_server(tmp_path: Path) -> None:
    with serve(tmp_path, tls=True) as running:
        alice, bob = joined(running.server, "alice"), joined(running.server, "bob")
        revoke(tmp_path, alice)
        assert listed(tmp_path) == {"admin": True, alice: False, bob: True}
        shown = runner.invoke(member.app, ["list", "--folder", str(tmp_path)]).output
        assert "ended" in next(line for line in shown.splitlines() if alice in line)


def test_members_of_a_stopped_server(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.opened():
        server.folder.write_address(ServerAddress(url="http://127.0.0.1:9", fingerprint=""))
        alice = joined(server, "alice")
    revoke(tmp_path, alice)
    assert listed(tmp_path) == {"admin": True, alice: False}


def test_a_token_comes_from_stdin_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of a process is visible to all users of its machine."""
    app = typer.Typer()

    @app.command()
    def show(token: Token = None) -> None:
        typer.echo(token)

    assert runner.invoke(app, ["--token", "-"], input="rvn..from-stdin\n").output == "rvn..from-stdin\n"
    assert runner.invoke(app, ["--token", "-"], input="").exit_code == 2
    monkeypatch.setenv("RAVNEST_TOKEN", "rvn..from-env")
    assert runner.invoke(app, []).output == "rvn..from-env\n"
