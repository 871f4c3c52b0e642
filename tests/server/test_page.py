"""The page: for members, escaped, and without anything from elsewhere."""

import re
from pathlib import Path

import pytest
from server_cases import Case, opened
from starlette.testclient import TestClient

from ravnest.schemas.auth import ApiRole
from ravnest.server.web.rendering import line

HOSTILE = "<script>alert(1)</script>\"'&"


def browser(case: Case, token: str | None) -> TestClient:
    """A browser of its own; with a token it has followed the login link."""
    client = TestClient(case.client.app, base_url=str(case.client.base_url))
    if token is not None:
        answer = client.get("/login", params={"token": token})
        assert answer.status_code == 200
    return client


def token(case: Case, role: ApiRole = ApiRole.VIEWER) -> str:
    return str(case.server.trust.create_token(role, ""))


def test_without_a_login_it_says_how_to_get_in(case: Case) -> None:
    answer = browser(case, None).get("/")
    assert answer.status_code == 401
    assert "ravnest token create --role viewer" in answer.text


def test_it_shows_providers_jobs_and_losses(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita, name="digits")
    case.match()
    alice.report("training", losses=[3.0, 2.0, 1.5])
    text = browser(case, token(case)).get("/").text
    for words in ("alice", "4.0 GB", "digits", job, "training", "<svg", "<polyline", "1.5"):
        assert words in text


def test_what_others_wrote_is_escaped(case: Case) -> None:
    rita, alice = case.requester(HOSTILE), case.provider(HOSTILE)
    case.submit(rita, name=HOSTILE)
    case.match()
    alice.report("failed", reason=HOSTILE)
    text = browser(case, token(case)).get("/").text
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") >= 4


def test_it_loads_nothing_from_elsewhere_and_runs_no_script(case: Case) -> None:
    answer = browser(case, token(case)).get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "script-src" not in answer.headers["content-security-policy"]
    assert not re.search(r"(src|href)\s*=", answer.text)
    assert "no-store" in answer.headers["cache-control"]


@pytest.mark.parametrize("tls", [False, True])
def test_the_cookie_is_for_this_server_only(tmp_path: Path, tls: bool) -> None:
    with opened(tmp_path, tls=tls) as case:
        answer = case.client.get("/login", params={"token": token(case)})
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert ("secure" in cookie) == tls
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_login_link_works_once_and_a_wrong_one_not_at_all(case: Case) -> None:
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


def test_the_cookie_opens_the_page_and_not_the_api(case: Case) -> None:
    assert browser(case, token(case, ApiRole.REQUESTER)).get("/api/jobs").status_code == 401


def test_a_requester_sees_its_own_jobs_and_a_provider_none(case: Case) -> None:
    job = case.submit(case.requester())
    for role, sees in [(ApiRole.REQUESTER, False), (ApiRole.PROVIDER, False), (ApiRole.VIEWER, True)]:
        assert (job in browser(case, token(case, role)).get("/").text) == sees


def test_a_line_of_losses() -> None:
    assert line([]) == line([(0, 1.0)]) == ""
    assert 'points="0.0,0.0 110.0,44.0 220.0,22.0"' in line([(10, 3.0), (11, 1.0), (12, 2.0)])
    assert "points" in line([(0, 1.0), (1, 1.0)])
