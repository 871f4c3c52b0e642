"""``ravnest serve`` and ``ravnest token``."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from ravnest.cli import token
from ravnest.cli.serve import _instructions
from ravnest.errors import ServerError
from ravnest.http.credentials import join
from ravnest.schemas.auth import JoinToken
from ravnest.server.http.runner import serve


def test_the_provider_token_that_serve_prints_works_for_several_machines(tmp_path: Path) -> None:
    with serve(tmp_path, "127.0.0.1", 0) as running:
        shown = _instructions(running, tmp_path)
        text = next(line.split()[-1] for line in shown.splitlines() if " ravnest provide " in line)
        assert len({join(running.url, text, name).id for name in ("one", "two", "three")}) == 3


def test_a_folder_with_spaces_is_quoted_in_the_advice(tmp_path: Path) -> None:
    folder = tmp_path / "my server"
    with serve(folder, "127.0.0.1", 0) as running:
        assert f"--folder '{folder}'" in _instructions(running, folder)


def test_only_the_token_is_written_to_stdout(tmp_path: Path) -> None:
    with serve(tmp_path) as running:
        made = CliRunner().invoke(token.app, ["create", "--role", "provider", "--folder", str(tmp_path)])
        assert made.exit_code == 0
        text = made.stdout.strip()
        assert f"ravnest provide --server {running.url} --token {text}" in made.stderr
        assert running.server.auth.join(JoinToken.parse(text).secret, "alice", "x").role == "provider"


def test_viewers_get_a_login_link_and_programs_json(tmp_path: Path) -> None:
    with serve(tmp_path, tls=True) as running:
        arguments = ["create", "--role", "viewer", "--folder", str(tmp_path)]
        made = CliRunner().invoke(token.app, arguments)
        assert f"{running.url}/login?token={made.stdout.strip()}" in made.stderr
        answer = json.loads(
            CliRunner().invoke(token.app, [*arguments, "--uses", "0", "--hours", "2", "--json"]).stdout
        )
        assert JoinToken.parse(answer.pop("token")).fingerprint == running.fingerprint
        assert answer == {"url": running.url, "role": "viewer", "uses": None, "hours": 2.0}


def test_tokens_for_other_roles_are_refused() -> None:
    assert CliRunner().invoke(token.app, ["create", "--role", "nobody"]).exit_code == 2


def test_without_a_server_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    made = CliRunner().invoke(token.app, ["create", "--role", "viewer", "--folder", str(tmp_path / "x")])
    assert isinstance(made.exception, ServerError)
    assert "ravnest serve --folder" in str(made.exception)
    assert not (tmp_path / "x").exists()


def test_serve_prints_how_to_join_and_ends_with_ctrl_c(tmp_path: Path) -> None:
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
