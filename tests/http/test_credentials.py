"""A token becomes a membership, with the server that the token names and no other."""

import datetime
import hashlib
import json
import ssl
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ravnest.errors import ServerError, ServerUnreachableError
from ravnest.http.api import ApiClient
from ravnest.http.credentials import (
    Membership,
    TokenError,
    find,
    forget,
    join,
    joined,
    memberships,
    save,
)
from ravnest.http.retry import RetryPolicy
from ravnest.schemas.auth import ApiRole, JoinToken
from ravnest.transport.certificates import Authority

NOW = datetime.datetime.now(datetime.UTC)
QUICK = RetryPolicy(sleep=lambda _: pytest.fail("tried again"))


class Routes(BaseHTTPRequestHandler):
    """What a server says to somebody who joins."""

    server: "JoinServer"

    def do_GET(self) -> None:
        self._answer(self.server.shown)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.joins.append(body)
        answer = {"id": "m1", "role": "requester", "credential": "a-credential"}
        self._answer(json.dumps(answer).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class JoinServer(ThreadingHTTPServer):
    """Speaks HTTPS where it is given an authority."""

    def __init__(self, folder: Path, authority: Authority | None, hosts: tuple[str, ...]) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.joins: list[dict[str, str]] = []
        self.shown = authority.certificate if authority else b""
        if authority is not None:
            issued = authority.issue("server", hosts)
            (folder / "chain.pem").write_bytes(issued.certificate + issued.key)
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(folder / "chain.pem")
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    def handle_error(self, *_: object) -> None:
        """A client that does not trust us hangs up: expected."""

    @property
    def port(self) -> int:
        return int(self.server_address[1])


def running(server: JoinServer) -> Iterator[JoinServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("test", NOW)


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[JoinServer]:
    yield from running(JoinServer(tmp_path, authority, ("127.0.0.1",)))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[JoinServer]:
    yield from running(JoinServer(tmp_path, None, ()))


def fingerprint(authority: Authority) -> str:
    der = ssl.PEM_cert_to_DER_cert(authority.certificate.decode())
    return hashlib.sha256(der).hexdigest()


def token(authority: Authority) -> str:
    return str(JoinToken("a-secret", fingerprint(authority)))


def test_joining_by_https_pins_the_authority(server: JoinServer, authority: Authority) -> None:
    url = f"https://127.0.0.1:{server.port}"
    member = join(f"{url}/", token(authority), "me")
    assert (member.url, member.id, member.role, member.name) == (url, "m1", ApiRole.REQUESTER, "me")
    assert server.joins == [{"secret": "a-secret", "name": "me"}]
    server.shown = b'{"ok": true}'
    with member.api() as api:
        assert api.get("/api/health", dict[str, bool]) == {"ok": True}
    assert "a-credential" not in repr(member)


def test_a_host_without_scheme_is_asked_as_the_token_says(
    server: JoinServer, authority: Authority
) -> None:
    member = join(f"127.0.0.1:{server.port}", token(authority), "me")
    assert member.url == f"https://127.0.0.1:{server.port}"


def test_a_server_of_another_authority_gets_no_secret(server: JoinServer) -> None:
    other = Authority("test", NOW)
    with pytest.raises(ServerUnreachableError, match="is not the one that the token names"):
        join(f"https://127.0.0.1:{server.port}", token(other), "me", patience=QUICK)
    server.shown = other.certificate  # it may know what the right one would show, but not its key
    with pytest.raises(ServerUnreachableError, match="is not the one that the token names"):
        join(f"https://127.0.0.1:{server.port}", token(other), "me", patience=QUICK)
    server.shown = b"no certificate"
    with pytest.raises(ServerError, match="is not a certificate"):
        join(f"https://127.0.0.1:{server.port}", token(other), "me", patience=QUICK)
    assert server.joins == []


def test_a_certificate_for_another_host_is_refused(tmp_path: Path, authority: Authority) -> None:
    for server in running(JoinServer(tmp_path, authority, ("example.org",))):
        with pytest.raises(ServerUnreachableError, match=r"is not for the name 127\.0\.0\.1"):
            join(f"https://127.0.0.1:{server.port}", token(authority), "me", patience=QUICK)
        assert server.joins == []


def test_a_certificate_is_trusted_by_no_other_way(server: JoinServer, authority: Authority) -> None:
    for trusted in (None, Authority("test", NOW).certificate.decode()):
        with (
            ApiClient(f"https://127.0.0.1:{server.port}", authority=trusted, patience=QUICK) as api,
            pytest.raises(ServerUnreachableError, match="is not the one that the token names"),
        ):
            api.get("/api/health", object)


def test_https_to_a_plain_server_says_so(plain: JoinServer, authority: Authority) -> None:
    with pytest.raises(ServerUnreachableError, match="does not speak HTTPS"):
        join(f"https://127.0.0.1:{plain.port}", token(authority), "me", patience=QUICK)


def test_joining_by_plain_http_on_this_machine(plain: JoinServer) -> None:
    member = join(f"http://127.0.0.1:{plain.port}", str(JoinToken("s")), "me")
    assert member.authority is None
    assert plain.joins == [{"secret": "s", "name": "me"}]


def test_a_token_given_again_is_not_used_again(plain: JoinServer, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{plain.port}"
    first = joined(url, "rvn..one", "me", folder=tmp_path)
    assert joined(f"{url}/", "rvn..one", "me", folder=tmp_path) == first
    assert memberships(tmp_path) == (first,)
    joined(url, "rvn..one", "another", folder=tmp_path)
    joined(url, "rvn..two", "me", folder=tmp_path)
    assert [entry["name"] for entry in plain.joins] == ["me", "another", "me"]
    assert "one" not in (tmp_path / "servers.json").read_text()


@pytest.mark.parametrize(
    ("url", "text", "says"),
    [
        ("http://127.0.0.1:9", "nonsense", "looks like rvn."),
        ("http://127.0.0.1:9", f"rvn.{'0' * 64}.s", "does not begin with https"),
        ("https://127.0.0.1:9", "rvn..s", "names no certificate"),
        ("http://10.0.0.1:9", "rvn..s", "is another machine"),
    ],
)
def test_a_secret_goes_nowhere_else(url: str, text: str, says: str) -> None:
    with pytest.raises(TokenError, match=says):
        join(url, text, "me")


def member(url: str, role: ApiRole, name: str, credential: str = "c") -> Membership:
    return Membership(url, "id", role, credential, "PEM", name)


def test_memberships_are_kept_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "ravnest"
    assert memberships(folder) == ()
    first = member("http://a", ApiRole.REQUESTER, "me")
    save(first, folder)
    save(member("http://a", ApiRole.PROVIDER, "pc"), folder)
    newer = member("http://a", ApiRole.REQUESTER, "me", "newer")
    save(newer, folder)
    assert set(memberships(folder)) == {newer, member("http://a", ApiRole.PROVIDER, "pc")}
    assert stat.S_IMODE((folder / "servers.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert find("http://a/", [ApiRole.VIEWER, ApiRole.REQUESTER], folder=folder) == newer
    assert find("http://a", [ApiRole.PROVIDER], "other", folder) is None
    assert find("http://b", list(ApiRole), folder=folder) is None
    forget(first, folder)
    assert [one.name for one in memberships(folder)] == ["pc"]
    assert sorted(path.name for path in folder.iterdir()) == [".servers.json.lock", "servers.json"]


def test_many_join_at_once(tmp_path: Path) -> None:
    members = [member("http://a", ApiRole.PROVIDER, f"pc-{number}") for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: save(one, tmp_path), members))
    assert set(memberships(tmp_path)) == set(members)


@pytest.mark.parametrize("text", ["{", "[]", '{"servers": [{"url": "x"}]}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "servers.json").write_text(text)
    with pytest.raises(ServerError, match=r"servers\.json cannot be read"):
        memberships(tmp_path)
