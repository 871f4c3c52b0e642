"""Members: revoked and expired credentials, what they see of others, what others may be called."""

import logging
import stat
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import provider, training_pair
from server_cases import Case, opened

from ravnest.cli.console import event_line
from ravnest.errors import ServerRefusedError, UnsafeFolderError
from ravnest.host import make_private
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.base import clipped, plain
from ravnest.schemas.jobs import EventView
from ravnest.server.auth.tokens import CREDENTIAL_DAYS
from ravnest.telemetry import ScheduleRecord, ValidationRecord

ESCAPE = "\x1b]0;owned\x07\x1b[2Jalice\u202e"


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with opened(tmp_path) as found:
        yield found


def test_a_revoked_provider_is_refused_and_leaves_its_job(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita)
    case.match()
    assert alice.heartbeat()["assignment"] == f"{job}-0"
    case.admin().call("DELETE", f"/api/members/{alice.id}")
    alice.heartbeat(401)
    alice.get(f"/api/assignments/{job}-0", 401)
    alice.call("POST", f"/api/assignments/{job}-0/certificate", 401, json={"csr": ""})
    (view,) = case.admin().get("/api/providers")
    assert view["state"] == "lost"
    assert "revoked" in view["reason"]
    assert "the credential of alice was revoked" in [event["reason"] for event in case.events()]


def test_the_other_nodes_of_a_job_learn_at_once_that_a_provider_was_revoked(case: Case) -> None:
    """Its peers kept their links to it until another provider had its place."""
    _, _, alice, bob = training_pair(case)
    reply = alice.heartbeat()
    assert "excluded" not in reply, "earlier versions do not know the field"
    known = {"known": reply["assignment"], "may_train": True, "upload": reply["upload"]}
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(alice.heartbeat(**known, wait=60)))
    waiting.start()
    topics = case.server.notifications._subscriptions
    while ("provider", alice.id) not in topics:
        waiting.join(0.01)
    case.admin().call("DELETE", f"/api/members/{bob.id}")
    waiting.join(30)
    excluded = [{"node": 1, "generation": 0}]
    assert answers[0]["excluded"] == excluded
    provider(case, "carol", 2)
    assert alice.heartbeat()["excluded"] == excluded, "carol has generation 1 of the node"


def test_a_provider_that_is_lost_already_is_excluded_too(case: Case) -> None:
    _, _, alice, bob = training_pair(case)
    case.server.provider_service.leave(bob.id, "its link was cut")
    assert "excluded" not in alice.heartbeat()
    case.admin().call("DELETE", f"/api/members/{bob.id}")
    assert alice.heartbeat()["excluded"] == [{"node": 1, "generation": 0}]


def test_a_heartbeat_that_waits_ends_when_its_provider_is_revoked(case: Case) -> None:
    """The reply to a long poll came after the revocation, with an assignment."""
    alice = case.provider("alice")
    status = []

    def poll() -> None:
        answer = case.client.post(
            f"/api/providers/{alice.id}/heartbeat",
            json={"wait": 60},
            headers={"Authorization": f"Bearer {alice.credential}"},
        )
        status.append(answer.status_code)

    waiting = threading.Thread(target=poll)
    waiting.start()
    topics = case.server.notifications._subscriptions
    while ("provider", alice.id) not in topics:
        waiting.join(0.01)
    case.admin().call("DELETE", f"/api/members/{alice.id}")
    waiting.join(30)
    assert status == [401]


def test_credentials_expire(case: Case) -> None:
    viewer = case.member(ApiRole.VIEWER)
    case.time.now += CREDENTIAL_DAYS * 86400 - 1
    viewer.get("/api/jobs")
    case.time.now += 1
    viewer.get("/api/jobs", 401)
    assert case.admin().get("/api/members")[-1]["active"] is False


def test_only_the_admin_lists_and_revokes_and_is_not_revoked(case: Case) -> None:
    others = [case.member(role) for role in ApiRole if role is not ApiRole.ADMIN]
    for each in others:
        each.get("/api/members", 403)
        each.call("DELETE", f"/api/members/{others[0].id}", 403)
    assert len(case.admin().get("/api/members")) == 1 + len(others)
    case.admin().call("DELETE", "/api/members/admin", 409)
    case.admin().call("DELETE", "/api/members/nobody", 404)
    with pytest.raises(ServerRefusedError):
        case.server.auth.revoke("nobody")


def test_members_see_of_others_what_their_role_needs(case: Case) -> None:
    rita, tom = case.requester("rita"), case.requester("tom")
    alice = case.provider("alice")
    bob = case.provider("bob", address="127.0.0.1:9001", ram=0.5)
    relay = case.member(ApiRole.RELAY)
    job = case.submit(rita, max_providers=1)
    case.match()
    for each in (alice, bob):
        assert [view["id"] for view in each.get("/api/providers")] == [each.id]
    assert relay.get("/api/providers") == []
    assert {view["job"] for view in rita.get("/api/providers")} == {job, None}
    hidden = tom.get("/api/providers")
    assert {view["job"] for view in hidden} == {None}
    assert all(job not in view["reason"] for view in hidden)
    assert {view["job"] for view in case.admin().get("/api/providers")} == {job, None}


def test_control_characters_of_names_and_reasons_are_removed(case: Case) -> None:
    """A name moved the cursor of the operator's terminal and set its title."""
    alice = case.provider(ESCAPE)
    rita = case.requester(ESCAPE)
    case.submit(rita, name=ESCAPE)
    case.match()
    alice.report("failed", reason=f"{ESCAPE}\nsecond line")
    alice.call("DELETE", f"/api/providers/{alice.id}", params={"reason": ESCAPE})
    found = str([*case.events(), *case.admin().get("/api/jobs"), *case.admin().get("/api/providers")])
    assert "alice" in found
    for hidden in ("\\x1b", "\\x07", "\\u202e", "\x1b", "\u202e"):
        assert hidden not in found
    answer = case.client.post("/api/join", json={"secret": "x", "name": "\x1b\x07"})
    assert answer.status_code == 422


def test_control_characters_of_figures_and_plans_are_removed(case: Case) -> None:
    """Names of metrics and reasons of schedules came to terminals as providers sent them."""
    alice, rita = case.provider("alice"), case.requester()
    case.planner.explanation = f"Node(0): layers {ESCAPE}\n  all"
    job = case.submit(rita)
    case.match()
    figures = ValidationRecord(0, 0, ESCAPE, 0.5, 8, metrics={ESCAPE: 0.5})
    schedule = ScheduleRecord("sync", 2, f"{ESCAPE}\nsecond line")
    alice.report("training", records=[asdict(each) for each in (figures, schedule)])
    view, history = rita.get(f"/api/jobs/{job}"), rita.get(f"/api/jobs/{job}/losses")
    assert "\n  all" in view["plan"]
    assert "second line" in str(view)
    assert history["validations"]
    for hidden in ("\\x1b", "\\x07", "\\u202e"):
        assert hidden not in str([view, history])


def test_a_reason_cannot_forge_lines_of_a_log() -> None:
    event = EventView(
        sequence=1, time=0.0, kind="job", subject="j", before="", after="", reason="a\n2026-01-01 b"
    )
    assert "\n2026" not in event_line(event)
    assert plain("a\x00b\x9bc\u2066d") == "abcd"
    assert clipped("a\r\nb\tc") == "a\nb\tc"


@pytest.mark.parametrize("tls", [False, True])
def test_the_cookie_belongs_to_this_host_alone_under_tls(tmp_path: Path, tls: bool) -> None:
    with opened(tmp_path, tls=tls) as case:
        token = case.server.auth.create_token(ApiRole.VIEWER, "")
        answer = case.client.get(f"/login?token={token}")
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-ravnest=" if tls else "ravnest=")
        assert ("Secure" in cookie) == tls
        assert "Path=/" in cookie
        assert "Domain" not in cookie
        assert case.client.get("/").status_code == 200


def test_folders_with_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    """A folder that existed kept its mode, so that all users could read the admin's credential."""
    folder = tmp_path / "server"
    folder.mkdir(mode=0o755)
    folder.chmod(0o777)
    with opened(folder):
        for each in (folder, folder / "authority", folder / "authorities"):
            assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(UnsafeFolderError, match="shared by many"):
        make_private(shared)
    monkeypatch.setattr("os.geteuid", lambda: shared.stat().st_uid + 1)
    with pytest.raises(UnsafeFolderError, match="another user"):
        make_private(tmp_path / "own")


def test_a_path_cannot_forge_lines_of_the_access_log(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ravnest.server.access"):
        case.client.get("/%0aGET%20/forged%1b[2J")
    assert any("forged" in record.getMessage() for record in caplog.records)
    assert all(record.getMessage().isprintable() for record in caplog.records)
