"""Permissions: every route refuses members without the right role."""

import asyncio
import os
import re
import threading
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from server_cases import Case, artifact, opened, spec

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobView
from ravnest.server.db.records import MemberRecord
from ravnest.server.rate_limits import Rate
from ravnest.server.settings import ServerSettings
from ravnest.transport.certificates import signing_request

OPEN = {"/api/health", "/api/authority", "/api/join", "/login", "/static/{path:path}"}


def routes(case: Case) -> list[tuple[str, str]]:
    return [
        (method, route.path)
        for route in all_routes(case.client.app.routes)  # type: ignore[attr-defined]
        for method in sorted(route.methods or ())
    ]


def all_routes(listed: list[object]) -> list[APIRoute]:
    found = []
    for route in listed:
        if isinstance(route, APIRoute):
            found.append(route)
        else:
            inner = getattr(route, "routes", None) or getattr(
                getattr(route, "original_router", None), "routes", []
            )
            found += all_routes(list(inner))
    return found


def filled(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "0" * 64, path)


def test_all_routes_refuse_a_missing_or_wrong_credential(case: Case) -> None:
    found = routes(case)
    assert len(found) > 20
    assert set(OPEN) < {path for _, path in found}
    for method, path in found:
        if path in OPEN:
            continue
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic YTpi"}):
            answer = case.client.request(method, filled(path), headers=headers)
            assert answer.status_code == 401, (method, path, answer.text)
            if path.startswith("/api"):
                assert isinstance(answer.json()["detail"], str)
                assert answer.headers["www-authenticate"] == "Bearer"


def test_no_other_paths_are_served(case: Case) -> None:
    for path in ("/docs", "/redoc", "/openapi.json", "/api/nothing"):
        assert case.client.get(path).status_code == 404


ALLOWED = {
    ("GET", "/api/providers"): {*ApiRole},
    ("GET", "/api/relays"): {*ApiRole},
    ("POST", "/api/relays"): {ApiRole.RELAY},
    ("DELETE", "/api/relays"): {ApiRole.RELAY},
    ("POST", "/api/providers/dial-back"): {ApiRole.PROVIDER},
    ("GET", "/api/events"): {ApiRole.VIEWER},
    ("GET", "/api/jobs"): {ApiRole.REQUESTER, ApiRole.VIEWER},
    ("POST", "/api/jobs"): {ApiRole.REQUESTER},
    ("POST", "/api/providers"): {ApiRole.PROVIDER},
    ("POST", "/api/providers/{x}/heartbeat"): {ApiRole.PROVIDER},
    ("DELETE", "/api/providers/{x}"): {ApiRole.PROVIDER},
    ("GET", "/api/assignments/{x}"): {ApiRole.PROVIDER},
    ("GET", "/api/assignments/{x}/peers"): {ApiRole.PROVIDER},
    ("POST", "/api/assignments/{x}/certificate"): {ApiRole.PROVIDER},
    ("POST", "/api/jobs/{x}/cancel"): {ApiRole.REQUESTER},
    ("GET", "/api/jobs/{x}/result"): {ApiRole.REQUESTER},
    ("GET", "/api/jobs/{x}/best"): {ApiRole.REQUESTER},
    ("GET", "/api/artifacts/{x}"): {ApiRole.REQUESTER, ApiRole.PROVIDER},
    ("POST", "/api/artifacts/missing"): {ApiRole.REQUESTER, ApiRole.PROVIDER},
    ("PUT", "/api/artifacts/{x}/upload"): {ApiRole.REQUESTER, ApiRole.PROVIDER},
}


@pytest.mark.parametrize("role", sorted({*ApiRole} - {ApiRole.ADMIN}))
def test_a_route_refuses_other_roles_and_records_it(case: Case, role: ApiRole) -> None:
    member = case.member(role, "mallory")
    headers = {"Authorization": f"Bearer {member.credential}"}
    expected = []
    for (method, path), roles in ALLOWED.items():
        answer = case.client.request(method, filled(path), headers=headers)
        refused_for_role = answer.status_code == 403 and "may not" in answer.json()["detail"]
        assert refused_for_role == (role not in roles), (method, path, answer.text)
        if refused_for_role:
            expected.append(answer.json()["detail"])
    found = [reason for reason in case.refusals() if "may not" in reason]
    assert found == expected
    assert all(f"mallory is a {role}" in reason for reason in found)


def test_a_provider_has_no_access_to_another_assignment(case: Case) -> None:
    requester = case.requester()
    alice, bob = case.provider("alice"), case.provider("bob", address="127.0.0.1:9001")
    case.submit(requester, max_providers=1)
    case.match()
    assignment = alice.heartbeat()["assignment"] or bob.heartbeat()["assignment"]
    owner, other = (alice, bob) if alice.heartbeat()["assignment"] else (bob, alice)
    request = {"csr": signing_request("x")[0].decode()}
    weights = artifact("weights").sha256

    assert owner.get(f"/api/assignments/{assignment}")["id"] == assignment
    owner.post(f"/api/assignments/{assignment}/certificate", request)
    assert owner.get(f"/api/artifacts/{weights}")

    other.get(f"/api/assignments/{assignment}", 403)
    other.get(f"/api/assignments/{assignment}/peers", 403)
    other.post(f"/api/assignments/{assignment}/certificate", request, 403)
    other.get(f"/api/artifacts/{weights}", 403)
    other.heartbeat(403, report={"assignment": assignment, "phase": "failed"})
    other.post(f"/api/providers/{owner.id}/heartbeat", {"wait": 0}, 403)
    other.call("DELETE", f"/api/providers/{owner.id}", 403)
    owner.get("/api/assignments/unknown", 404)
    assert len(case.refusals()) == 7
    assert owner.heartbeat()["assignment"] == assignment


def test_a_requester_has_no_access_to_the_jobs_of_others(case: Case) -> None:
    rita, mallory = case.requester("rita"), case.member(ApiRole.REQUESTER, "mallory")
    job = case.submit(rita)
    for path in ("", "/wait?timeout=0", "/losses", "/events", "/result", "/best", "/trace", "/trace/x"):
        mallory.get(f"/api/jobs/{job}{path}", 403)
    mallory.post(f"/api/jobs/{job}/cancel", None, 403)
    mallory.post(f"/api/jobs/{job}/trace", None, 403)
    mallory.get(f"/api/artifacts/{artifact('weights').sha256}", 403)
    assert mallory.get("/api/jobs") == []
    assert len(case.refusals()) == 11
    assert [each["id"] for each in rita.get("/api/jobs")] == [job]
    assert [each["id"] for each in case.member(ApiRole.VIEWER).get("/api/jobs")] == [job]
    rita.get("/api/jobs/job-none", 404)


def test_knowing_a_digest_gives_no_access_to_the_file(case: Case) -> None:
    case.requester("rita")
    mallory = case.member(ApiRole.REQUESTER, "mallory")
    sha = artifact("weights").sha256
    assert mallory.post("/api/artifacts/missing", {"digests": [sha]})["digests"] == [sha]
    assert mallory.get(f"/api/artifacts/{sha}/upload") == {"received": 0}
    answer = mallory.post("/api/jobs", spec(), 422)
    assert "not uploaded" in answer["detail"]


def test_members_get_the_description_of_the_api(case: Case) -> None:
    document = case.member(ApiRole.VIEWER).get("/api/openapi.json")
    assert "/api/jobs/{job}/wait" in document["paths"]
    assert "Assignment" in document["components"]["schemas"]


def test_bodies_have_a_size_limit(tmp_path: Path) -> None:
    with opened(tmp_path, settings=ServerSettings(largest_message=100_000)) as case:
        member = case.member(ApiRole.PROVIDER)
        headers = {"Content-Type": "application/json"}
        chunks = (b"x" * 1000 for _ in range(101))  # without a length in the header
        member.call("POST", "/api/providers", 413, content=b"x" * 100_001, headers=headers)
        member.call("POST", "/api/providers", 413, content=chunks, headers=headers)
        answer = case.client.post("/api/join", content=b"x" * 70_000, headers=headers)
        assert answer.status_code == 413


def test_errors_are_sentences_and_do_not_repeat_the_input(case: Case) -> None:
    answer = case.client.post("/api/join", json={"secret": ["a-secret"], "name": "x"})
    assert answer.status_code == 422
    assert "secret" in answer.json()["detail"]
    assert "a-secret" not in answer.text


def test_the_probe_sends_and_discards_bytes(case: Case) -> None:
    member = case.member(ApiRole.PROVIDER)
    assert len(member.get("/api/probe?bytes=1000")) == 1000
    member.get("/api/probe?bytes=99999999999", 422)
    assert member.call("POST", "/api/probe", content=b"x" * 5000) == {"received": 5000}


def test_the_authority_is_public(tmp_path: Path) -> None:
    with opened(tmp_path) as case:
        assert case.client.get("/api/authority").text == case.server.auth.authority
        assert case.client.get("/api/health").json()["status"] == "ok"


def test_a_member_that_sends_too_many_requests_has_to_wait(tmp_path: Path) -> None:
    with opened(tmp_path, settings=ServerSettings(requests=Rate(burst=5, per_second=0.5))) as case:
        eager, other = case.member(ApiRole.VIEWER), case.member(ApiRole.VIEWER)
        for _ in range(5):
            eager.get("/api/jobs")
        headers = {"Authorization": f"Bearer {eager.credential}"}
        answer = case.client.get("/api/jobs", headers=headers)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "2")
        assert "requests per second" in answer.json()["detail"]
        other.get("/api/jobs")
        case.time.now += 2
        eager.get("/api/jobs")


def test_a_long_message_counts_as_many_requests(tmp_path: Path) -> None:
    with opened(tmp_path, settings=ServerSettings(requests=Rate(burst=60, per_second=0.5))) as case:
        eager, other = case.member(ApiRole.REQUESTER), case.member(ApiRole.REQUESTER)
        long = {"digests": ["0" * 64] * 50_000}  # 3.4 MB
        eager.post("/api/artifacts/missing", long)
        eager.post("/api/artifacts/missing", {"digests": []})
        eager.post("/api/artifacts/missing", long)
        eager.post("/api/artifacts/missing", {"digests": []}, 429)
        other.post("/api/artifacts/missing", {"digests": []})


def test_one_member_does_not_have_all_threads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    mallory, alice = case.member(ApiRole.VIEWER, "mallory"), case.member(ApiRole.VIEWER)
    gate, entered = threading.Event(), threading.Semaphore(0)

    def slow(member: MemberRecord) -> list[JobView]:
        if member.id == mallory.id:
            entered.release()
            assert gate.wait(60)
        return []

    monkeypatch.setattr(case.server, "visible_jobs", slow)

    async def attack() -> int:
        transport = httpx.ASGITransport(case.client.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            headers = [{"Authorization": f"Bearer {each.credential}"} for each in (mallory, alice)]
            held = [asyncio.create_task(client.get("/api/jobs", headers=headers[0])) for _ in range(64)]
            try:
                async with asyncio.timeout(30):
                    while not entered.acquire(blocking=False):
                        await asyncio.sleep(0.01)
                    answer = await client.get("/api/jobs", headers=headers[1])
            finally:
                gate.set()
            answers = await asyncio.gather(*held)
            assert all(each.status_code == 200 for each in answers)
            return answer.status_code

    assert asyncio.run(attack()) == 200


def test_a_probe_is_not_in_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def random(size: int) -> bytes:
        asked.append(size)
        return bytes(size)

    member = case.member(ApiRole.VIEWER)
    monkeypatch.setattr(os, "urandom", random)
    assert len(member.get("/api/probe?bytes=16777216")) == 16 << 20
    assert max(asked) <= 64 << 10
