"""Joining the real server with a token, and the memberships that are saved."""

import datetime
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loopback_server import LoopbackServer, loopback_server

from ravnest.errors import ServerError, ServerRefusedError, ServerUnreachableError
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
from ravnest.server.http import runner as server_runner
from ravnest.transport.certificates import Authority

NOW = datetime.datetime.now(datetime.UTC)
NO_PAUSE = RetryPolicy(sleep=lambda _: pytest.fail("tried again"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    """The real server, with HTTPS."""
    with loopback_server(tmp_path_factory.mktemp("https"), tls=True) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    """The real server, with plain HTTP."""
    with loopback_server(tmp_path_factory.mktemp("http")) as found:
        yield found


def token(server: LoopbackServer) -> str:
    return server.running.token(ApiRole.REQUESTER)


def forged(text: str, authority: Authority) -> str:
    """Return the token with the fingerprint of another authority."""
    return str(JoinToken(JoinToken.parse(text).secret, authority.fingerprint))


def test_joining_by_https_pins_the_authority(server: LoopbackServer) -> None:
    member = join(f"{server.url}/", token(server), "me")
    assert (member.url, member.role, member.name) == (server.url, ApiRole.REQUESTER, "me")
    with member.api() as api:
        assert api.get("/api/jobs", list[object]) == []
    assert member.credential not in repr(member)


def test_a_host_without_scheme_gets_the_scheme_of_the_token(server: LoopbackServer) -> None:
    assert join(server.url.removeprefix("https://"), token(server), "me").url == server.url


def test_a_server_of_another_authority_gets_no_secret(
    server: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority("test", NOW)
    text = token(server)
    auth = type(server.running.server.auth)
    with pytest.raises(ServerUnreachableError, match="is not the one that the token names"):
        join(server.url, forged(text, other), "me", retry=NO_PAUSE)
    # It may show the certificate of the expected authority, but it does not have its key.
    monkeypatch.setattr(auth, "authority", property(lambda _: other.certificate.decode()))
    with pytest.raises(ServerUnreachableError, match="is not the one that the token names"):
        join(server.url, forged(text, other), "me", retry=NO_PAUSE)
    monkeypatch.setattr(auth, "authority", property(lambda _: "no certificate"))
    with pytest.raises(ServerError, match="is not a certificate"):
        join(server.url, forged(text, other), "me", retry=NO_PAUSE)
    monkeypatch.undo()
    assert join(server.url, text, "me"), "the token was not used before"


def test_a_certificate_for_another_host_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_runner, "certificate_names", lambda *_: ["example.org"])
    with (
        loopback_server(tmp_path, tls=True) as server,
        pytest.raises(ServerUnreachableError, match=r"does not cover the name 127\.0\.0\.1"),
    ):
        join(server.url, token(server), "me", retry=NO_PAUSE)


def test_only_the_pinned_authority_is_trusted(server: LoopbackServer) -> None:
    for trusted in (None, Authority("test", NOW).certificate.decode()):
        with (
            ApiClient(server.url, authority=trusted, retry=NO_PAUSE) as api,
            pytest.raises(ServerUnreachableError, match="is not the one that the token names"),
        ):
            api.get("/api/health", object)


def test_https_to_a_plain_server_is_explained(plain: LoopbackServer) -> None:
    url = plain.url.replace("http://", "https://")
    with pytest.raises(ServerUnreachableError, match="does not use HTTPS"):
        join(url, forged(token(plain), Authority("test", NOW)), "me", retry=NO_PAUSE)


def test_joining_by_plain_http_on_this_machine(plain: LoopbackServer) -> None:
    assert join(plain.url, token(plain), "me").authority is None


def test_a_token_that_is_given_again_is_not_used_again(plain: LoopbackServer, tmp_path: Path) -> None:
    once, twice = token(plain), plain.running.token(ApiRole.REQUESTER, uses=2)
    first = joined(plain.url, once, "me", folder=tmp_path)
    assert joined(f"{plain.url}/", once, "me", folder=tmp_path) == first
    assert memberships(tmp_path) == (first,)
    with pytest.raises(ServerRefusedError):
        joined(plain.url, once, "another", folder=tmp_path)
    ids = {joined(plain.url, twice, name, folder=tmp_path).id for name in ("me", "another")}
    assert len(ids | {first.id}) == 3
    assert JoinToken.parse(once).secret not in (tmp_path / "servers.json").read_text()


@pytest.mark.parametrize(
    ("url", "text", "says"),
    [
        ("http://127.0.0.1:9", "nonsense", r"looks like rvn\."),
        ("http://127.0.0.1:9", f"rvn.{'0' * 64}.s", "does not begin with https"),
        ("https://127.0.0.1:9", "rvn..s", "has no fingerprint"),
        ("http://10.0.0.1:9", "rvn..s", "is another machine"),
    ],
)
def test_a_token_for_another_address_is_not_sent(url: str, text: str, says: str) -> None:
    with pytest.raises(TokenError, match=says):
        join(url, text, "me")


def member(url: str, role: ApiRole, name: str, credential: str = "c") -> Membership:
    return Membership(url, "id", role, credential, "PEM", name)


def test_memberships_are_readable_by_their_owner_only(tmp_path: Path) -> None:
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
    assert {path.name for path in folder.iterdir()} <= {".servers.json.lock", "servers.json"}


def test_concurrent_changes_are_all_saved(tmp_path: Path) -> None:
    members = [member("http://a", ApiRole.PROVIDER, f"pc-{number}") for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: save(one, tmp_path), members))
    assert set(memberships(tmp_path)) == set(members)


@pytest.mark.parametrize("text", ["{", "[]", '{"servers": [{"url": "x"}]}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "servers.json").write_text(text)
    with pytest.raises(ServerError, match=r"servers\.json cannot be read"):
        memberships(tmp_path)
