"""``provide``: its output, its arguments, and how it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loopback_server import (
    SECONDS,
    LoopbackServer,
    loopback_server,
    offer_of,
    wait_for_updates,
)
from running_providers import available_sandbox, sandbox_option, workers
from typer.testing import CliRunner

from ravnest import __version__
from ravnest.cli.app import app
from ravnest.errors import ServerError, ServerRefusedError, SettingsError
from ravnest.http.api import ApiClient
from ravnest.provider.benchmark import OwnerLimits
from ravnest.provider.provide import describe, describe_disk, provide
from ravnest.provider.runner import Provider
from ravnest.schemas.auth import ApiRole
from ravnest.types import Address

URL = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    with loopback_server(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def _sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the sandbox of this system, if it has one."""
    monkeypatch.setattr("ravnest.provider.provide.choose_sandbox", lambda _choice: available_sandbox())


def test_a_provider_with_little_disk_space_says_so(tmp_path: Path) -> None:
    assert describe_disk(200_000_000_000, None, tmp_path) is None
    assert describe_disk(4_000_000_000, 2.0, tmp_path) is None
    low = describe_disk(4_000_000_000, None, tmp_path)
    assert low is not None
    assert low.startswith("little disk space: the files of a job can take 2.93 GB in ")
    assert low.endswith("free some space, or give another --folder")
    assert describe_disk(4_000_000_000, 20.0, tmp_path) == low
    with pytest.raises(SettingsError, match=r"has 0.50 GB of free disk space, .* no job fits"):
        describe_disk(500_000_000, None, tmp_path)


def test_the_offer_is_described() -> None:
    lines = describe(offer_of(ram=6.4), OwnerLimits(ram=8.0), 2.0, "https://server:8400")
    text = "\n".join(lines)
    for expected in ("attic", "6.4 GB", "8 GB were requested", "1 core", "10 GFLOP/s", "for 2 h"):
        assert expected in text
    for expected in ("https://server:8400", "1000 Mbit/s", "1.0 ms"):
        assert expected in text
    assert "requested" not in describe(offer_of(ram=3.6), OwnerLimits(ram=4.0), None, URL)[0]


def test_without_a_token_a_provider_must_have_joined() -> None:
    with pytest.raises(ServerError, match=r"attic has not joined .*--token"):
        provide(URL, name="attic")


def test_a_token_for_another_role_is_refused(server: LoopbackServer) -> None:
    with pytest.raises(ServerError, match=r"--role\s+provider"):
        provide(server.url, server.running.token(ApiRole.VIEWER), name="attic")


@pytest.mark.parametrize("options", [{"hours": 0}, {"hours": -1}, {"ram": 0}, {"cores": 0}])
def test_limits_of_zero_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        provide(URL, **options)  # type: ignore[arg-type]


def test_two_providers_of_one_name_do_not_run_at_once(server: LoopbackServer, tmp_path: Path) -> None:
    def say(_line: str) -> None:
        for folder in (None, tmp_path / "another"):
            with pytest.raises(SettingsError, match=r"attic .*another --name"):
                provide(server.url, name="attic", folder=folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        provide(server.url, server.running.token(ApiRole.PROVIDER), name="attic", cores=1, say=say)


def test_a_provider_leaves_after_its_hours_and_needs_no_token_the_second_time(
    server: LoopbackServer,
) -> None:
    lines: list[str] = []
    token = server.running.token(ApiRole.PROVIDER)
    provide(server.url, token, name="hourly", hours=1e-9, cores=1, say=lines.append)
    assert "hours are over" in server.provider("hourly").reason
    assert "hours are over" in lines[-1]
    provide(server.url, name="hourly", hours=1e-9, cores=1, say=lines.append)


def test_prometheus_reads_figures_at_the_given_port(
    server: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[str] = []

    def say(line: str) -> None:
        if line.startswith("Prometheus reads"):
            with urllib.request.urlopen(line.rpartition(" ")[2], timeout=SECONDS) as answer:
                pages.append(answer.read().decode())

    token = server.running.token(ApiRole.PROVIDER)
    page = Address("127.0.0.1", 0)
    provide(server.url, token, name="measured", hours=1e-9, cores=1, say=say, metrics=page)
    (text,) = pages
    assert f'ravnest_provider_info{{name="measured",version="{__version__}"}} 1\n' in text
    assert 'ravnest_provider_state{state="offered"} 1\n' in text

    given: list[Address | None] = []
    monkeypatch.setattr(
        "ravnest.cli.provide.provide_machine", lambda *_, metrics, **__: given.append(metrics)
    )
    command = ["provide", "--server", URL]
    for options in ([], ["--metrics-port", "9100"], ["--metrics-port=9100", "--metrics-host=0.0.0.0"]):
        assert CliRunner().invoke(app, [*command, *options]).exit_code == 0
    assert given == [None, Address("127.0.0.1", 9100), Address("0.0.0.0", 9100)]


def test_a_refused_credential_raises(server: LoopbackServer) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        """Change the credential after the offer, as if the server had removed the member."""
        lines.append(line)
        if len(lines) == 1:
            patch.setattr(Provider, "run", run)

    original = Provider.run

    def run(self: Provider) -> None:
        self.api = ApiClient(server.url, "another-credential")
        original(self)

    token = server.running.token(ApiRole.PROVIDER)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ServerRefusedError) as refused:
        provide(server.url, token, name="refused", cores=1, say=say)
    assert refused.value.status == 401


@pytest.fixture
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    """A server without the providers of other tests."""
    with loopback_server(tmp_path_factory.mktemp("own")) as found:
        yield found


@contextmanager
def training_provider(
    server: LoopbackServer, name: str, folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """Run ``ravnest provide`` as a process; yield it once it trains, and check that its worker ends."""
    command = [sys.executable, "-P", "-m", "ravnest.cli.app", "provide", f"--server={server.url}"]
    command.append(sandbox_option())
    options = [f"--name={name}", "--ram=0.5", "--cores=1", f"--folder={folder}"]
    with (
        server.submit(epochs=10**6) as handle,
        subprocess.Popen(
            [*command, f"--token={server.running.token(ApiRole.PROVIDER)}", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            wait_for_updates(handle)
            (worker,) = workers(process.pid)
            watched = os.pidfd_open(worker.pid)
            yield process
            gone, _, _ = select.select([watched], [], [], SECONDS)
            os.close(watched)
            assert gone, "the worker still runs"
        finally:
            process.kill()


def test_an_interrupt_stops_the_worker_and_leaves(own_server: LoopbackServer, tmp_path: Path) -> None:
    with training_provider(own_server, "stopped", tmp_path) as process:
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert "its owner stopped it" in output
        assert "stopped offers 0.45 GB of RAM and 1 core" in output
        assert not errors
    assert "its owner stopped it" in own_server.provider("stopped").reason
    assert list((tmp_path / "jobs").iterdir()), "the job waits for its return, with its checkpoints"


def test_a_worker_ends_when_its_agent_is_killed_and_leaves_its_folder(
    own_server: LoopbackServer, tmp_path: Path
) -> None:
    with training_provider(own_server, "killed", tmp_path) as process:
        process.kill()
        process.wait(SECONDS)
    assert len(list((tmp_path / "jobs").iterdir())) == 1, "the next process reports it as lost"
