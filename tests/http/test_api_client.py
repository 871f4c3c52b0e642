"""Requests: which are retried, and what the errors say."""

import httpx
import pytest

from ravnest.errors import ServerError, ServerRefusedError, ServerUnreachableError
from ravnest.http.api import ApiClient, is_loopback
from ravnest.http.retry import RetryPolicy
from ravnest.schemas.jobs import JobCreated, MissingArtifacts


class Script:
    """Scripted responses, and the requests that got them."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.pauses: list[float] = []

    def api(self, credential: str | None = None, tries: int = 4) -> ApiClient:
        retry = RetryPolicy(tries=tries, sleep=self.pauses.append, chance=lambda: 1.0)
        transport = httpx.MockTransport(self._answer)
        return ApiClient("http://127.0.0.1:7/", credential, retry=retry, transport=transport)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ok() -> httpx.Response:
    return httpx.Response(200, json={"id": "job-1"})


def test_requests_and_answers_are_typed() -> None:
    script = Script(ok())
    body = MissingArtifacts(digests=("0" * 64,))
    assert script.api("secret").post("/api/jobs", body, JobCreated) == JobCreated(id="job-1")
    (request,) = script.requests
    assert request.url == "http://127.0.0.1:7/api/jobs"
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["Content-Type"] == "application/json"
    assert MissingArtifacts.model_validate_json(request.content) == body


def test_lists_and_empty_answers() -> None:
    script = Script(httpx.Response(200, json=[{"id": "a"}]), httpx.Response(204), httpx.Response(204))
    api = script.api()
    assert api.get("/api/jobs", list[JobCreated]) == [JobCreated(id="a")]
    assert api.post("/api/jobs/a/cancel", None, object) is None
    api.delete("/api/providers/p", params={"reason": "enough & more"})
    assert script.requests[-1].url.params["reason"] == "enough & more"
    assert "Authorization" not in script.requests[0].headers


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("hung up"),
        *(httpx.Response(status, json={"detail": "busy"}) for status in (500, 502, 503, 504, 507)),
    ],
)
def test_a_get_is_retried_with_growing_pauses(trouble: httpx.Response | Exception) -> None:
    script = Script(trouble, trouble, ok())
    assert script.api().get("/x", JobCreated).id == "job-1"
    assert script.pauses == [0.2, 0.4]


@pytest.mark.parametrize(
    ("header", "pause"), [("3", 3.0), ("0", 0.2), ("9999", 60.0), ("soon", 0.2), ("-1", 0.2)]
)
def test_a_pause_is_as_long_as_the_server_asks_for(header: str, pause: float) -> None:
    busy = httpx.Response(429, json={"detail": "too often"}, headers={"Retry-After": header})
    script = Script(busy, ok())
    assert script.api().get("/x", JobCreated).id == "job-1"
    assert script.pauses == [pause]


def test_tries_are_bounded() -> None:
    script = Script(*[httpx.ConnectError("refused")] * 4)
    with pytest.raises(ServerUnreachableError) as error:
        script.api().get("/x", JobCreated)
    assert "http://127.0.0.1:7" in str(error.value)
    assert "`ravnest serve`" in str(error.value)
    assert len(script.requests) == 4


def test_pauses_are_bounded_and_jittered() -> None:
    retry = RetryPolicy(tries=8, first=1.0, most=5.0, chance=iter([0, 1, 0, 1, 0, 1, 0]).__next__)
    assert list(retry.pauses()) == [0.5, 2.0, 2.0, 5.0, 2.5, 5.0, 2.5]


def test_only_an_idempotent_post_is_retried() -> None:
    script = Script(httpx.ReadError("broken"), httpx.ReadError("broken"), ok())
    with pytest.raises(ServerUnreachableError, match=r"the connection to .* broke"):
        script.api().post("/x", None, JobCreated)
    assert script.api().post("/x", None, JobCreated, idempotent=True).id == "job-1"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (httpx.Response(409, json={"detail": "the job is done"}), "the job is done"),
        (httpx.Response(404, text="<html>"), "GET http://127.0.0.1:7/x was answered with 404"),
        (httpx.Response(501, json=["odd"]), "was answered with 501"),
        (
            httpx.Response(422, json={"detail": [{"loc": ["body", "name"], "msg": "too long"}]}),
            "body.name: too long",
        ),
        (httpx.Response(422, json={"detail": [5]}), "was answered with 422"),
    ],
)
def test_a_refusal_has_the_message_of_the_server(answer: httpx.Response, sentence: str) -> None:
    script = Script(answer)
    with pytest.raises(ServerRefusedError) as refused:
        script.api().get("/x", JobCreated)
    assert sentence in str(refused.value)
    assert refused.value.status == answer.status_code
    assert script.pauses == []


def test_an_answer_in_another_format_is_an_error() -> None:
    for answer in (httpx.Response(200, text="<html>"), httpx.Response(200, json={"name": "x"})):
        with pytest.raises(ServerError, match="is it a Ravnest server"):
            Script(answer).api().get("/x", JobCreated)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:80", "http://exa mple:80x"])
def test_an_invalid_address_is_not_retried(url: str) -> None:
    with pytest.raises(ServerUnreachableError, match="is not the address of a server"):
        ApiClient(url, retry=RetryPolicy(sleep=lambda _: pytest.fail("waited"))).get("/x", JobCreated)


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ["http://127.0.0.1:5", "https://localhost", "http://[::1]:80"]))
    assert not any(map(is_loopback, ["http://10.0.0.1", "https://example.org"]))
