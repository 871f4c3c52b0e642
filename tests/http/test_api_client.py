"""Requests: what is tried again, and what the errors say."""

import httpx
import pytest

from ravnest.errors import ServerError, ServerRefusedError, ServerUnreachableError
from ravnest.http.api import ApiClient, is_loopback
from ravnest.http.retry import RetryPolicy
from ravnest.schemas.jobs import JobCreated, MissingArtifacts


class Script:
    """Answers that come one after another, and what was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []
        self.pauses: list[float] = []

    def api(self, credential: str | None = None, tries: int = 4) -> ApiClient:
        patience = RetryPolicy(tries=tries, sleep=self.pauses.append, chance=lambda: 1.0)
        transport = httpx.MockTransport(self._answer)
        return ApiClient("http://127.0.0.1:7/", credential, patience=patience, transport=transport)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ok() -> httpx.Response:
    return httpx.Response(200, json={"id": "job-1"})


def test_a_value_goes_out_and_a_value_comes_back() -> None:
    script = Script(ok())
    body = MissingArtifacts(digests=("0" * 64,))
    assert script.api("secret").post("/api/jobs", body, JobCreated) == JobCreated(id="job-1")
    (request,) = script.asked
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
    assert script.asked[-1].url.params["reason"] == "enough & more"
    assert "Authorization" not in script.asked[0].headers


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("hung up"),
        httpx.Response(503, json={"detail": "busy"}),
    ],
)
def test_a_get_is_tried_again_with_growing_pauses(trouble: httpx.Response | Exception) -> None:
    script = Script(trouble, trouble, ok())
    assert script.api().get("/x", JobCreated).id == "job-1"
    assert script.pauses == [0.2, 0.4]


def test_tries_are_bounded() -> None:
    script = Script(*[httpx.ConnectError("refused")] * 4)
    with pytest.raises(ServerUnreachableError) as error:
        script.api().get("/x", JobCreated)
    assert str(error.value) == (
        "nothing answers at http://127.0.0.1:7: is `ravnest serve` running there?"
    )
    assert len(script.asked) == 4


def test_pauses_are_bounded_and_left_to_chance() -> None:
    patience = RetryPolicy(tries=8, first=1.0, most=5.0, chance=iter([0, 1, 0, 1, 0, 1, 0]).__next__)
    assert list(patience.pauses()) == [0.5, 2.0, 2.0, 5.0, 2.5, 5.0, 2.5]


def test_a_post_is_tried_again_only_if_it_may_be() -> None:
    script = Script(httpx.ReadError("broken"), httpx.ReadError("broken"), ok())
    with pytest.raises(ServerUnreachableError, match=r"the connection to .* broke"):
        script.api().post("/x", None, JobCreated)
    assert script.api().post("/x", None, JobCreated, idempotent=True).id == "job-1"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (httpx.Response(409, json={"detail": "the job is done"}), "the job is done"),
        (httpx.Response(404, text="<html>"), "GET http://127.0.0.1:7/x was answered with 404"),
        (httpx.Response(500, json=["odd"]), "was answered with 500"),
        (
            httpx.Response(422, json={"detail": [{"loc": ["body", "name"], "msg": "too long"}]}),
            "the server does not accept this: body.name: too long",
        ),
        (httpx.Response(422, json={"detail": [5]}), "was answered with 422"),
    ],
)
def test_a_refusal_says_what_the_server_says(answer: httpx.Response, sentence: str) -> None:
    script = Script(answer)
    with pytest.raises(ServerRefusedError) as refused:
        script.api().get("/x", JobCreated)
    assert sentence in str(refused.value)
    assert refused.value.status == answer.status_code
    assert script.pauses == []


def test_an_answer_of_something_else_is_an_error() -> None:
    for answer in (httpx.Response(200, text="<html>"), httpx.Response(200, json={"name": "x"})):
        with pytest.raises(ServerError, match="is not understood; is it a Ravnest server"):
            Script(answer).api().get("/x", JobCreated)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:80", "http://exa mple:80x"])
def test_what_is_no_address_is_said_at_once(url: str) -> None:
    with pytest.raises(ServerUnreachableError, match="is not the address of a server"):
        ApiClient(url, patience=RetryPolicy(sleep=lambda _: pytest.fail("waited"))).get("/x", JobCreated)


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ["http://127.0.0.1:5", "https://localhost", "http://[::1]:80"]))
    assert not any(map(is_loopback, ["http://10.0.0.1", "https://example.org"]))
