"""Which server is meant when none, one or several are known."""

from pathlib import Path

import pytest
from fake_server import FakeServer

from ravnest.client.server_selection import MAY_LOOK, WhichServerError, choose, own_name
from ravnest.http.credentials import Membership, memberships, save
from ravnest.schemas.auth import ApiRole


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path))
    monkeypatch.delenv("RAVNEST_SERVER", raising=False)
    return tmp_path


def know(url: str, role: ApiRole) -> Membership:
    member = Membership(url, "id", role, "credential", None, "me")
    save(member)
    return member


def test_the_only_server_is_meant() -> None:
    member = know("http://127.0.0.1:1", ApiRole.REQUESTER)
    know("http://127.0.0.1:2", ApiRole.VIEWER)
    assert choose() == member


def test_one_of_several_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (know(f"http://127.0.0.1:{n}", ApiRole.REQUESTER) for n in (1, 2))
    with pytest.raises(WhichServerError, match=r"several servers are known: http://127\.0\.0\.1:1, "):
        choose()
    assert choose("http://127.0.0.1:1/") == first
    assert choose("127.0.0.1:2") == second
    monkeypatch.setenv("RAVNEST_SERVER", "http://127.0.0.1:2")
    assert choose() == second
    assert choose("http://127.0.0.1:1") == first


def test_who_looks_need_not_be_a_requester() -> None:
    viewer = know("http://127.0.0.1:1", ApiRole.VIEWER)
    assert choose(roles=MAY_LOOK) == viewer
    requester = know("http://127.0.0.1:1", ApiRole.REQUESTER)
    assert choose(roles=MAY_LOOK) == requester


def test_what_is_missing_is_said() -> None:
    with pytest.raises(WhichServerError, match="no server is known: name one with --server"):
        choose()
    with pytest.raises(WhichServerError, match="needs the address of its server"):
        choose(token="rvn..secret")
    with pytest.raises(WhichServerError, match="was not joined yet: add --token once"):
        choose("http://127.0.0.1:5")


def test_a_token_joins_and_is_remembered() -> None:
    with FakeServer().running() as server:
        member = choose(server.url, "rvn..secret")
    assert memberships() == (member,)
    assert (member.name, member.credential) == (own_name(), "credential")
    assert choose() == member


def test_another_token_does_not_make_another_requester_of_us() -> None:
    with FakeServer().running() as server:
        member = choose(server.url, "rvn..secret")
        assert choose(server.url, "rvn..another") == member
        assert server.asked.count("POST /api/join") == 1
        server.refusals["GET /api/jobs"] = (401, "who are you?")
        choose(server.url, "rvn..another")
        assert server.asked.count("POST /api/join") == 2, "the server at this address is a new one"
