"""``ravnest serve`` and ``ravnest token``."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ravnest.cli import token
from ravnest.errors import ServerError
from ravnest.schemas.auth import JoinToken
from ravnest.server.http.runner import serve


def test_a_token_is_all_that_goes_to_the_output(tmp_path: Path) -> None:
    with serve(tmp_path) as running:
        made = CliRunner().invoke(token.app, ["create", "--role", "provider", "--folder", str(tmp_path)])
        assert made.exit_code == 0
        text = made.stdout.strip()
        assert f"ravnest provide --server {running.url} --token {text}" in made.stderr
        assert running.server.auth.join(JoinToken.parse(text).secret, "alice", "x").role == "provider"


def test_a_login_link_is_made_for_viewers_and_json_for_programs(tmp_path: Path) -> None:
    with serve(tmp_path, tls=True) as running:
        arguments = ["create", "--role", "viewer", "--folder", str(tmp_path)]
        made = CliRunner().invoke(token.app, arguments)
        assert f"{running.url}/login?token={made.stdout.strip()}" in made.stderr
        answer = json.loads(
            CliRunner().invoke(token.app, [*arguments, "--uses", "0", "--hours", "2", "--json"]).stdout
        )
        assert JoinToken.parse(answer.pop("token")).fingerprint == running.fingerprint
        assert answer == {"url": running.url, "role": "viewer", "uses": None, "hours": 2.0}


@pytest.mark.parametrize("role", ["admin", "nobody"])
def test_some_roles_cannot_be_had_for_a_token(tmp_path: Path, role: str) -> None:
    assert CliRunner().invoke(token.app, ["create", "--role", role]).exit_code == 2


def test_without_a_server_it_says_where_to_start_one(tmp_path: Path) -> None:
    made = CliRunner().invoke(token.app, ["create", "--role", "viewer", "--folder", str(tmp_path / "x")])
    assert isinstance(made.exception, ServerError)
    assert "ravnest serve --folder" in str(made.exception)
    assert not (tmp_path / "x").exists()


def test_serve_says_how_to_join_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    code = "from ravnest.cli.serve import serve; import typer; typer.run(serve)"
    command = [sys.executable, "-c", code, "--port", "0", "--folder", str(tmp_path), "--tls"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(8)]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    said = "".join(lines)
    for words in (
        "https://127.0.0.1:",
        "ravnest provide --server",
        "ravnest submit",
        "/login?token=rvn.",
    ):
        assert words in said
    assert "has stopped" in rest
