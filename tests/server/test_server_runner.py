"""A server over real sockets, in a thread and as a process."""

import datetime
import gc
import hashlib
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_cases import offer

from ravnest.errors import ServerError
from ravnest.schemas.auth import ApiRole, JoinToken
from ravnest.server.http.runner import RunningServer, avoid_pauses, create_token, serve
from ravnest.transport.certificates import Authority

LONG = 30.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    with serve(tmp_path / "server") as found:
        yield found


def joined(running: RunningServer, role: str, **client: Any) -> tuple[httpx.Client, str]:
    token = JoinToken.parse(running.token(role))
    http = httpx.Client(base_url=running.url, timeout=LONG, trust_env=False, **client)
    answer = http.post("/api/join", json={"secret": token.secret, "name": role}).json()
    http.headers["Authorization"] = f"Bearer {answer['credential']}"
    return http, answer["id"]


def test_loopback_uses_plain_http(running: RunningServer) -> None:
    assert running.url.startswith("http://127.0.0.1:")
    assert running.fingerprint == ""
    assert running.token("viewer").startswith("rvn..")
    assert httpx.get(f"{running.url}/api/health", trust_env=False).json()["status"] == "ok"


def test_waiting_requests_are_answered_when_the_server_stops(tmp_path: Path) -> None:
    with serve(tmp_path) as running:
        provider, name = joined(running, "provider")
        provider.post("/api/providers", json=offer().model_dump())
        answers: list[int] = []

        def poll() -> None:
            answer = provider.post(f"/api/providers/{name}/heartbeat", json={"wait": 60})
            answers.append(answer.status_code)

        thread = threading.Thread(target=poll)
        listening = threading.Event()
        listen = running.server.notifications.subscribe
        running.server.notifications.subscribe = lambda topic: (listening.set(), listen(topic))[1]  # type: ignore[method-assign]
        thread.start()
        assert listening.wait(LONG)
    thread.join(LONG)
    assert answers == [200]


def test_with_tls_the_token_has_the_fingerprint_of_the_authority(tmp_path: Path) -> None:
    with serve(tmp_path, tls=True) as running:
        assert running.url.startswith("https://127.0.0.1:")
        token = JoinToken.parse(running.token("viewer"))
        pem = httpx.get(f"{running.url}/api/authority", verify=False, trust_env=False).text
        assert hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() == token.fingerprint
        trusting = ssl.create_default_context(cadata=pem)
        viewer, _ = joined(running, "viewer", verify=trusting)
        assert viewer.get("/api/providers").json() == []
        link = viewer.get("/login", params={"token": running.token("viewer")})
        assert "secure" in link.headers["set-cookie"].lower()
        viewer.close()

        other = Authority("another", datetime.datetime.now(datetime.UTC)).certificate.decode()
        for distrusting in (True, ssl.create_default_context(cadata=other)):
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(f"{running.url}/api/health", verify=distrusting, trust_env=False)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http{running.url.removeprefix('https')}/api/health", trust_env=False)


def test_serving_other_machines_without_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="without TLS"), serve(tmp_path, host="0.0.0.0", tls=False):
        pass


def test_a_port_in_use_raises_an_error_with_the_reason(running: RunningServer, tmp_path: Path) -> None:
    port = int(running.url.rpartition(":")[2])
    with pytest.raises(ServerError, match="is in use"), serve(tmp_path / "other", port=port):
        pass


def test_the_log_contains_no_secrets(running: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        token = running.token("viewer")
        browser = httpx.Client(base_url=running.url, trust_env=False)
        credential = browser.get("/login", params={"token": token}).cookies["ravnest"]
        assert browser.get("/").status_code == 200
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    assert any("GET /login 200" in line for line in ours)
    for secret in (JoinToken.parse(token).secret, credential):
        assert not any(secret in line for line in ours)


def test_a_token_can_be_created_while_the_server_runs(running: RunningServer, tmp_path: Path) -> None:
    url, text = create_token(tmp_path / "server", ApiRole.PROVIDER, uses=None)
    assert url == running.url
    body = {"secret": JoinToken.parse(text).secret, "name": "alice"}
    for _ in range(2):
        assert httpx.post(f"{url}/api/join", json=body, trust_env=False).status_code == 200
    with pytest.raises(ServerError, match="is not the folder of a server"):
        create_token(tmp_path / "elsewhere", ApiRole.PROVIDER)


class Process:
    """``ravnest serve`` as a process."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        code = "import sys; from ravnest.cli.serve import serve; import typer; typer.run(serve)"
        command = [sys.executable, "-c", code, "--json", "--port", str(port), "--folder", str(folder)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert self._process.stdout is not None
        self.said = json.loads(self._process.stdout.readline())

    def end(self, kind: signal.Signals) -> int:
        self._process.send_signal(kind)
        code = self._process.wait(LONG)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_killed_server_continues_after_a_restart(tmp_path: Path) -> None:
    port = free_port()
    process = Process(tmp_path, port)
    url, text = create_token(tmp_path, ApiRole.PROVIDER)
    assert url == process.said["url"] == f"http://127.0.0.1:{port}"
    http = httpx.Client(base_url=url, timeout=LONG, trust_env=False)
    answer = http.post("/api/join", json={"secret": JoinToken.parse(text).secret, "name": "a"}).json()
    http.headers["Authorization"] = f"Bearer {answer['credential']}"
    http.post("/api/providers", json=offer().model_dump())
    before = http.get("/api/providers").json()
    assert process.end(signal.SIGKILL) == -signal.SIGKILL
    http.close()

    process = Process(tmp_path, port)
    with httpx.Client(base_url=url, timeout=LONG, trust_env=False, headers=http.headers) as again:
        after = again.get("/api/providers").json()
        assert [each | {"seen": 0} for each in after] == [each | {"seen": 0} for each in before]
        reply = again.post(f"/api/providers/{answer['id']}/heartbeat", json={"wait": 0})
        assert reply.json()["assignment"] is None
    assert process.end(signal.SIGINT) == 0


def test_a_server_process_avoids_pauses_of_the_collector_and_of_other_threads() -> None:
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        avoid_pauses()
        assert gc.get_freeze_count() > 10_000, "objects of imported modules are left out"
        assert sys.getswitchinterval() < before / 5
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(before)
