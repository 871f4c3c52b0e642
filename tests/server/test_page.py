"""The web page: for members only, escaped, without scripts or external resources."""

import re
from html import unescape
from pathlib import Path

import pytest
from server_cases import Case, losses, opened, validation
from starlette.testclient import TestClient

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.reachability import AddressCheck

HOSTILE = "<script>alert(1)</script>\"'&"


def browser(case: Case, token: str | None) -> TestClient:
    """A browser with its own cookies; with a token it has followed the login link."""
    client = TestClient(case.client.app, base_url=str(case.client.base_url))
    if token is not None:
        answer = client.get("/login", params={"token": token})
        assert answer.status_code == 200
    return client


def token(case: Case, role: ApiRole = ApiRole.VIEWER) -> str:
    return str(case.server.auth.create_token(role, ""))


def test_without_a_login_it_explains_how_to_log_in(case: Case) -> None:
    answer = browser(case, None).get("/")
    assert answer.status_code == 401
    assert "ravnest token create --role viewer" in answer.text


def test_it_shows_providers_jobs_and_losses(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita, name="digits")
    case.match()
    alice.report("training", records=[*losses(3.0, 2.0, 1.5), validation(0, 0.875)])
    text = browser(case, token(case)).get("/").text
    for words in ("alice", "4.0 GB", "digits", job, "training", "1.5", "0.875"):
        assert words in text
    assert curves(text) == [[(0.0, 1.0), (0.5, 1 / 3), (1.0, 0.0)]]


def test_it_says_how_a_provider_is_reached_and_why(case: Case) -> None:
    alice = case.provider("alice")
    checks = [AddressCheck(address="127.0.0.1:9000", reachable=False, reason=HOSTILE)]
    with case.server.db.write(0.0) as db:
        db.providers.set_checks(alice.id, checks)
    text = browser(case, token(case)).get("/").text
    assert "<td" in text
    assert "unreachable" in text
    assert "open TCP port 9000" in text
    assert "<script" not in text


def test_text_of_other_people_is_escaped(case: Case) -> None:
    rita, alice = case.requester(HOSTILE), case.provider(HOSTILE)
    case.submit(rita, name=HOSTILE)
    case.match()
    alice.report("failed", reason=HOSTILE)
    text = browser(case, token(case)).get("/").text
    assert "<script" not in text
    assert unescape(text).count(HOSTILE) >= 4


def test_it_loads_no_external_resources_and_runs_no_script(case: Case) -> None:
    answer = browser(case, token(case)).get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "script-src" not in answer.headers["content-security-policy"]
    assert not re.search(r"(src|href)\s*=", answer.text)
    assert "no-store" in answer.headers["cache-control"]


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


def test_the_cookie_is_valid_for_the_page_and_not_for_the_api(case: Case) -> None:
    assert browser(case, token(case, ApiRole.REQUESTER)).get("/api/jobs").status_code == 401


def test_a_requester_sees_its_own_jobs_and_a_provider_none(case: Case) -> None:
    job = case.submit(case.requester())
    for role, sees in [(ApiRole.REQUESTER, False), (ApiRole.PROVIDER, False), (ApiRole.VIEWER, True)]:
        assert (job in browser(case, token(case, role)).get("/").text) == sees


@pytest.mark.parametrize(("values", "count"), [([], 0), ([1.0], 0), ([None, 1.0], 0), ([1.0, 1.0], 1)])
def test_a_curve_needs_two_losses(case: Case, values: list[float | None], count: int) -> None:
    rita, alice = case.requester(), case.provider("alice")
    case.submit(rita)
    case.match()
    alice.report("training", records=losses(*values))
    assert len(curves(browser(case, token(case)).get("/").text)) == count


def curves(text: str) -> list[list[tuple[float, float]]]:
    """The loss curves of a page: points between 0 and 1, the lowest loss at 0."""
    found = []
    for points in re.findall(r'<polyline points="([^"]*)"', text):
        pairs = [tuple(map(float, point.split(","))) for point in points.split()]
        right, bottom = max(x for x, _ in pairs), max(y for _, y in pairs) or 1.0
        found.append([(x / right, pytest.approx(1 - y / bottom, abs=0.01)) for x, y in pairs])
    return found
