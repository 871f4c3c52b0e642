"""Choice of the server if none, one or several servers are known."""

from pathlib import Path

import pytest
from job_server import JobServer

from ravnest.client.server_selection import (
    READ_ROLES,
    ServerSelectionError,
    select_server,
    user_name,
)
from ravnest.http.credentials import Membership, memberships, save
from ravnest.schemas.auth import ApiRole


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path))
    monkeypatch.delenv("RAVNEST_SERVER", raising=False)
    return tmp_path


def remember(url: str, role: ApiRole) -> Membership:
    member = Membership(url, "id", role, "credential", None, "me")
    save(member)
    return member


def test_the_only_joined_server_is_the_default() -> None:
    member = remember("http://127.0.0.1:1", ApiRole.REQUESTER)
    remember("http://127.0.0.1:2", ApiRole.VIEWER)
    assert select_server() == member


def test_one_of_several_servers_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (remember(f"http://127.0.0.1:{n}", ApiRole.REQUESTER) for n in (1, 2))
    with pytest.raises(ServerSelectionError, match=r"several .* http://127\.0\.0\.1:1, .*--server"):
        select_server()
    assert select_server("http://127.0.0.1:1/") == first
    assert select_server("127.0.0.1:2") == second
    monkeypatch.setenv("RAVNEST_SERVER", "http://127.0.0.1:2")
    assert select_server() == second
    assert select_server("http://127.0.0.1:1") == first


def test_a_viewer_is_enough_for_reading() -> None:
    viewer = remember("http://127.0.0.1:1", ApiRole.VIEWER)
    assert select_server(roles=READ_ROLES) == viewer
    requester = remember("http://127.0.0.1:1", ApiRole.REQUESTER)
    assert select_server(roles=READ_ROLES) == requester


def test_errors_name_the_missing_option() -> None:
    with pytest.raises(ServerSelectionError, match="no server is known: name one with --server"):
        select_server()
    with pytest.raises(ServerSelectionError, match="add --server URL"):
        select_server(token="rvn..secret")
    with pytest.raises(ServerSelectionError, match="not joined yet: add --token"):
        select_server("http://127.0.0.1:5")


def test_a_token_joins_the_server_and_the_membership_is_stored(shared_server: JobServer) -> None:
    member = select_server(shared_server.url, shared_server.token())
    assert memberships() == (member,)
    assert (member.name, member.role) == (user_name(), ApiRole.REQUESTER)
    assert select_server() == member


def test_a_second_token_does_not_replace_a_valid_membership(shared_server: JobServer) -> None:
    member = select_server(shared_server.url, shared_server.token())
    assert select_server(shared_server.url, shared_server.token()) == member
    assert memberships() == (member,)


def test_a_token_replaces_a_membership_that_the_server_does_not_know(shared_server: JobServer) -> None:
    unknown = remember(shared_server.url, ApiRole.REQUESTER)
    member = select_server(shared_server.url, shared_server.token())
    assert member.id != unknown.id
    assert select_server() == member
