"""``provide``: what it says, who may start it, and how it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from assigning_server import SECONDS, FakeServer, offer_of

from ravnest.errors import ServerError, SettingsError
from ravnest.http.credentials import Membership, save
from ravnest.provider import provide as provide_module
from ravnest.provider.benchmark import OwnerLimits
from ravnest.provider.provide import describe, provide
from ravnest.schemas.auth import ApiRole

URL = "http://127.0.0.1:1"
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "home"))


def member(name: str = "attic", role: ApiRole = ApiRole.PROVIDER) -> Membership:
    return Membership(URL, "m", role, "secret", None, name)


def test_an_offer_in_plain_lines() -> None:
    lines = describe(offer_of(ram=6.4), OwnerLimits(ram=8.0), 2.0, "https://server:8400")
    assert lines == [
        "attic offers 6.4 GB of RAM (8 were asked for: no more is free) and 1 core (10 GFLOP/s)",
        "to https://server:8400 (1000 Mbit/s, 1.0 ms), for 2 h, or until Ctrl-C",
        "other providers reach it at 127.0.0.1:20000",
    ]
    assert "asked for" not in describe(offer_of(ram=3.6), OwnerLimits(ram=4.0), None, URL)[0]


def test_without_a_token_a_provider_must_have_joined() -> None:
    with pytest.raises(ServerError, match=r"attic has not joined .*--token"):
        provide(URL, name="attic")


def test_a_token_for_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provide_module, "joined", lambda *_: member(role=ApiRole.VIEWER))
    with pytest.raises(ServerError, match="--role provider"):
        provide(URL, "rvn..x", name="attic")


@pytest.mark.parametrize("options", [{"hours": 0}, {"hours": -1}, {"ram": 0}, {"cores": 0}])
def test_limits_that_leave_nothing(options: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        provide(URL, **options)  # type: ignore[arg-type]


def test_two_of_one_name_do_not_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    save(member())
    monkeypatch.setattr(Membership, "api", lambda _: server.api())

    def say(_line: str) -> None:
        with pytest.raises(SettingsError, match="another --name"):
            provide(URL, name="attic")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        provide(URL, name="attic", cores=1, say=say)


def test_hours_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    save(member())
    monkeypatch.setattr(Membership, "api", lambda _: server.api())
    said: list[str] = []
    assert provide(URL, name="attic", hours=1e-9, cores=1, say=said.append) == 0
    assert server.left == {"attic": "the hours that it offered are over"}
    assert said[-1] == "leaves: the hours that it offered are over"


@contextmanager
def at_work(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """A provider in a process of its own that trains, its worker's process, and its lines so far."""
    paths = [path for path in sys.path if path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *paths]),
        "RAVNEST_HOME": str(folder),
    }
    with subprocess.Popen(
        [sys.executable, str(HERE / "provide_script.py"), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line.strip())
                if line.startswith("worker "):
                    break
            else:
                assert process.stderr is not None
                raise AssertionError("\n".join([*lines, process.stderr.read()]))
            pid = int(lines[-1].split()[1])
            watched = os.pidfd_open(pid)
            yield process, watched, lines
            gone, _, _ = select.select([watched], [], [], SECONDS)
            os.close(watched)
            assert gone, "the worker still runs"
        finally:
            process.kill()


def test_an_interrupt_stops_the_worker_and_leaves(tmp_path: Path) -> None:
    with at_work(tmp_path) as (process, _, lines):
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert "left {'attic': 'its owner stopped it'}" in output
        assert "leaves: its owner stopped it" in output
        assert not errors
    assert any(line.startswith("attic offers 0.45 GB of RAM and 1 core") for line in lines)


def test_a_worker_does_not_outlive_an_agent_that_is_killed_and_its_job_is_not_begun_again(
    tmp_path: Path,
) -> None:
    with at_work(tmp_path) as (process, _, _):
        process.kill()
        process.wait(SECONDS)
    assert [path.name for path in (tmp_path / "provider" / "jobs").iterdir()] == ["job-0"]
