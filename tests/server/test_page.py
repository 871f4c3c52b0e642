"""The web page: for members only, with scripts and styles of this server only."""

import hashlib
import json
import re
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from server_cases import Case, losses, opened, validation
from starlette.testclient import TestClient

from ravnest.schemas.auth import ApiRole
from ravnest.server.web.assets import assets
from ravnest.telemetry import PaceRecord, ValidationRecord

HOSTILE = "<script>alert(1)</script>\"'&"
PAGE = {"X-Ravnest-Page": "1"}


def browser(case: Case, token: str | None) -> TestClient:
    """A browser with its own cookies; with a token it has followed the login link."""
    client = TestClient(case.client.app, base_url=str(case.client.base_url))
    if token is not None:
        answer = client.get("/login", params={"token": token})
        assert answer.status_code == 200
    return client


def token(case: Case, role: ApiRole = ApiRole.VIEWER) -> str:
    return str(case.server.auth.create_token(role, ""))


def training_job(case: Case, **changes: Any) -> str:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita, **changes)
    case.match()
    alice.report("training", records=[*losses(3.0, 2.0, 1.5), validation(0, 0.875)])
    return job


def test_without_a_login_it_explains_how_to_log_in(case: Case) -> None:
    answer = browser(case, None).get("/")
    assert answer.status_code == 401
    assert "ravnest token create --role viewer" in answer.text


def test_the_shell_has_no_content_and_no_inline_script_or_style(case: Case) -> None:
    training_job(case, name=HOSTILE)
    answer = browser(case, token(case)).get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "alert" not in answer.text
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", answer.text)
    assert all(
        path.startswith("/static/") for path in re.findall(r'(?:src|href)="([^"]*)"', answer.text)
    )
    assert "no-store" in answer.headers["cache-control"]


def test_scripts_and_styles_come_from_the_package(case: Case) -> None:
    client = browser(case, None)
    assert {"app.js", "style.css", "vendor/preact.js", "vendor/uplot.js"} <= set(assets())
    for path in assets():
        answer = client.get(f"/static/{path}")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.get(f"/static/{path}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("../page.py", "vendor/../../page.py", "vendor/preact.LICENSE", "nothing.js", ""):
        assert client.get(f"/static/{path}").status_code == 404


def test_no_script_loads_or_evaluates_anything_from_elsewhere() -> None:
    for path, asset in assets().items():
        text = asset.content.decode(errors="replace")
        for address in re.findall(r"https?://[^\s\"'`)]+", text):
            assert path.startswith("vendor/") or "www.w3.org" in address, (path, address)
        if path.endswith(".js") and not path.startswith("vendor/"):
            imported = re.findall(r'(?:from|import) "([^"]+)"', text)
            assert all(each.startswith("./") for each in imported), (path, imported)
            assert not re.search(r"innerHTML|eval\(|new Function|dangerously", text), path


def test_every_request_of_a_script_has_a_deadline() -> None:
    for path, asset in assets().items():
        if path.endswith(".js") and not path.startswith("vendor/"):
            text = asset.content.decode()
            assert text.count("fetch(") == text.count("AbortSignal.timeout("), path


@pytest.mark.parametrize(
    "folder",
    [
        files("ravnest.server.web").joinpath("static", "vendor"),
        Path(__file__).parents[1] / "browser" / "vendor",
    ],
)
def test_vendored_files_are_the_listed_ones_with_licences(folder: Any) -> None:
    listed = json.loads(folder.joinpath("vendored.json").read_text())
    assert listed
    for package in listed:
        assert folder.joinpath(f"{package['name'].rpartition('/')[2]}.LICENSE").read_text()
        for name, digest in package["sha256"].items():
            assert hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("tls", [False, True])
def test_the_cookie_is_restricted_to_this_server(tmp_path: Path, tls: bool) -> None:
    with opened(tmp_path, tls=tls) as case:
        answer = case.client.get("/login", params={"token": token(case)})
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert ("secure" in cookie) == tls
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_login_link_works_once_and_a_wrong_one_does_not(case: Case) -> None:
    used = token(case)
    assert browser(case, used).get("/").status_code == 200
    for wrong in (used, "rvn..wrong", "nonsense", ""):
        answer = case.client.get("/login", params={"token": wrong})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert not wrong or wrong not in answer.text
    assert len(case.refusals()) == 2


def test_a_login_ends_after_a_month(case: Case) -> None:
    client = browser(case, token(case))
    case.time.now += case.server.settings.page_login
    assert client.get("/").status_code == 401
    assert client.get("/page/whoami").status_code == 401


def test_the_cookie_is_valid_for_the_page_and_not_for_the_api(case: Case) -> None:
    assert browser(case, token(case, ApiRole.REQUESTER)).get("/api/jobs").status_code == 401
    assert case.requester().get("/page/whoami", 401)


def test_a_job_has_nodes_curves_and_events(case: Case) -> None:
    job = training_job(case)
    client = browser(case, token(case))
    detail = client.get(f"/page/jobs/{job}").json()
    assert [(node["role"], node["name"]) for node in detail["nodes"]] == [("Root", "alice")]
    assert detail["view"]["progress"]["loss"] == 1.5
    assert (
        any("alice" in each["reason"] or "alice" in each["subject"] for each in detail["events"])
        or detail["events"]
    )
    assert ["epochs", "2"] in detail["settings"]
    curves = client.get(f"/page/jobs/{job}/curves").json()
    assert [each["mean"] for each in curves["loss"]["buckets"]] == [3.0, 2.0, 1.5]
    assert [each["value"] for each in curves["validations"]] == [0.875]


def test_all_metrics_of_a_validation_are_drawn(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita)
    case.match()
    results = {"accuracy": 0.5, "top-5": 0.9}
    records = [
        ValidationRecord(0, 1, "accuracy", 0.5, 8, results),
        ValidationRecord(1, 2, "loss", 2.0, 8),
    ]
    alice.report("training", records=[*losses(3.0), *map(asdict, records)])
    found = browser(case, token(case)).get(f"/page/jobs/{job}/curves").json()["validations"]
    drawn = [(each["epoch"], each["name"], each["value"]) for each in found]
    assert drawn == [(1, "accuracy", 0.5), (1, "top-5", 0.9), (2, "loss", 2.0)]


def test_a_job_has_the_measured_memory_of_its_nodes(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice", ram=4.5)
    job = case.submit(rita)
    case.match()
    client = browser(case, token(case))

    def memory() -> dict[str, int | None]:
        (node,) = client.get(f"/page/jobs/{job}").json()["nodes"]
        found: dict[str, int | None] = node["memory"]
        return found

    alice.report("training", records=losses(3.0))
    offered = 4_500_000_000
    assert memory() == {"planned": None, "offered": offered, "used": None, "peak": None}
    alice.report("training", records=losses(3.0, 2.0), memory={"now": 700, "peak": 900})
    assert memory() == {"planned": None, "offered": offered, "used": 700, "peak": 900}
    restarted = {"now": 300, "peak": 400, "of_a_later_version": 1}
    alice.report("training", records=losses(3.0, 2.0, 1.0), memory=restarted)
    assert memory() == {"planned": None, "offered": offered, "used": 300, "peak": 900}
    alice.report("training", records=losses(3.0, 2.0, 1.0, 1.0))
    assert (memory()["used"], memory()["peak"]) == (300, 900), "an older version does not say it"
    alice.report("uploading", memory={"now": 100, "peak": 2**53 - 1})
    assert (memory()["used"], memory()["peak"]) == (100, 2**53 - 1), "stored with the phase"
    for wrong in ({"now": -1, "peak": 1}, {"now": 1, "peak": 2**53}, {"now": 1}):
        alice.report("uploading", 422, memory=wrong)


def test_more_updates_than_predicted_are_not_more_than_all(case: Case) -> None:
    job = training_job(case)
    client = browser(case, token(case))
    (alice,) = (each["provider"] for each in client.get(f"/page/jobs/{job}").json()["nodes"])
    with case.server.db.write(1.0) as db:
        own = db.assignments.current(alice)
        assert own is not None
        db.telemetry.add(own, own.records, [PaceRecord(0, 2, 10.0, 0.0)])
        db.jobs.touch(job)
    progress = client.get(f"/page/jobs/{job}").json()["view"]["progress"]
    assert (progress["updates"], progress["total_updates"]) == (3, 3)


def test_a_provider_has_a_history(case: Case) -> None:
    job = training_job(case)
    viewer = browser(case, token(case))
    with case.server.db.read() as db:
        (provider,) = (each.id for each in db.providers.present())
    found = viewer.get(f"/page/providers/{provider}").json()
    assert [(each["job"], each["phase"]) for each in found["parts"]] == [(job, "training")]
    assert found["events"]
    assert viewer.get("/page/providers/nobody").status_code == 404


@pytest.mark.parametrize(
    ("role", "sees", "cancels", "manages"),
    [
        (ApiRole.VIEWER, 200, 403, 403),
        (ApiRole.REQUESTER, 403, 403, 403),
        (ApiRole.PROVIDER, 403, 403, 403),
        (ApiRole.ADMIN, 200, 200, 200),
    ],
)
def test_roles_see_and_do_what_they_may(
    case: Case, role: ApiRole, sees: int, cancels: int, manages: int
) -> None:
    job = training_job(case)
    client = browser(case, token(case, role))
    assert client.get(f"/page/jobs/{job}").status_code == sees
    assert client.get(f"/page/jobs/{job}/curves").status_code == sees
    assert client.get("/page/members").status_code == manages
    wanted = {"role": "provider"}
    assert client.post("/page/tokens", json=wanted, headers=PAGE).status_code == manages
    again = client.post(f"/page/jobs/{job}/resubmit", json={"epochs": 3}, headers=PAGE)
    assert again.status_code == cancels
    if cancels == 200:
        assert case.admin().get(f"/api/jobs/{again.json()['id']}")["progress"]["epochs"] == 3
    assert client.post(f"/page/jobs/{job}/cancel", headers=PAGE).status_code == cancels


def test_a_request_of_another_site_changes_nothing(case: Case) -> None:
    job = training_job(case)
    client = browser(case, token(case, ApiRole.ADMIN))
    assert client.post(f"/page/jobs/{job}/cancel").status_code == 403
    assert client.post(f"/page/jobs/{job}/resubmit", json={}).status_code == 403
    assert client.post("/page/tokens", json={"role": "provider"}).status_code == 403
    assert case.admin().get(f"/api/jobs/{job}")["state"] == "training"


def test_an_admin_creates_and_revokes_tokens_and_members(case: Case) -> None:
    client = browser(case, token(case, ApiRole.ADMIN))
    made = client.post("/page/tokens", json={"role": "viewer", "uses": 2}, headers=PAGE).json()["token"]
    assert client.post("/page/tokens", json={"role": "admin"}, headers=PAGE).status_code == 422
    guest = browser(case, made)
    listed = client.get("/page/members").json()
    (left,) = [each for each in listed["tokens"] if each["uses_left"] == 1]
    assert client.delete(f"/page/tokens/{left['id']}", headers=PAGE).status_code == 200
    assert client.delete(f"/page/tokens/{left['id']}", headers=PAGE).status_code == 404
    assert case.client.get("/login", params={"token": made}).status_code == 401
    member = guest.get("/page/whoami").json()["id"]
    assert client.delete(f"/page/members/{member}", headers=PAGE).status_code == 200
    assert guest.get("/page/whoami").status_code == 401


def test_a_member_follows_a_link_of_its_own(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita)
    case.match()
    alice.report("training", records=losses(1.0))
    path = rita.call("POST", "/api/page-link", 201)["path"]
    client = browser(case, path.partition("token=")[2])
    me = {"id": rita.id, "name": "rita", "role": "requester", "refusal": ""}
    assert client.get("/page/whoami").json() == me
    assert case.client.get(path).status_code == 401  # it worked once
    assert client.post(f"/page/jobs/{job}/cancel", headers=PAGE).status_code == 200
    cookie = client.cookies["ravnest"]
    for wrong in (
        cookie[:-1] + ("1" if cookie.endswith("0") else "0"),
        cookie.replace(rita.id, alice.id),
        "page.",
        "page..",
        "page.admin.9.x",
    ):
        forged = TestClient(case.client.app, cookies={"ravnest": wrong})
        assert forged.get("/page/whoami").status_code == 401, wrong
    case.server.revoke(rita.id)
    assert client.get("/page/whoami").status_code == 401


def test_a_link_of_its_own_ends_after_ten_minutes(case: Case) -> None:
    path = case.requester().call("POST", "/api/page-link", 201)["path"]
    case.time.now += 601
    assert case.client.get(path).status_code == 401


def test_a_logout_forgets_the_cookie(case: Case) -> None:
    client = browser(case, token(case))
    assert client.post("/page/logout", headers=PAGE).status_code == 200
    assert client.get("/page/whoami").status_code == 401
