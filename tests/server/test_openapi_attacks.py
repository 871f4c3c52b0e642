"""Random requests from the description of the API: no error of the server, no undocumented status."""

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks
from server_cases import Case, artifact, losses, offer, opened, spec
from starlette.testclient import TestClient

from ravnest.schemas.auth import ApiRole
from ravnest.server.rate_limits import Rate
from ravnest.server.settings import ServerSettings

METHODS = ("get", "post", "put", "delete")
EXAMPLES = 50 if settings.default.max_examples >= 100 else 3
"""Requests of each kind to each route: 3 in make test, 50 in make test-full."""
CHECKS = [checks.not_a_server_error, checks.status_code_conformance]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    often = Rate(1e9, 1e9)
    limits = ServerSettings(requests=often, strangers=often, longest_wait=0.0, unfinished_jobs=10_000)
    with opened(tmp_path_factory.mktemp("server"), settings=limits) as found:
        portal = found.client.portal
        found.client = TestClient(found.client.app, raise_server_exceptions=False)
        found.client.portal = portal
        yield found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, found in document["paths"].items():
        for method in METHODS:
            if method in found:
                yield path, method, found[method]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_requests_of_schemathesis_are_answered_as_described(case: Case, mode: GenerationMode) -> None:
    alice, job = case.provider(), case.submit(case.requester())
    case.match()
    members = [case.member(role) for role in ApiRole if role is not ApiRole.ADMIN]
    credentials = [each.credential for each in (case.admin(), alice, *members)]
    existing = {"job": job, "provider": alice.id, "sha": artifact("units").sha256, "node": "0"}
    schema = schemathesis.openapi.from_dict(case.admin().get("/api/openapi.json"))
    routes = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        routes += 1
        names = [each.name for each in operation.path_parameters]
        known = {name: existing[name] for name in names if name in existing}
        requests_to = st.one_of(
            operation.as_strategy(generation_mode=mode),
            operation.as_strategy(generation_mode=mode, path_parameters=known or None),
        )

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(requests_to, st.sampled_from([credentials[0], None, *credentials]))
        def attack(request: schemathesis.Case, credential: str | None) -> None:
            answer = sent(case, request, credential)
            request.validate_response(answer, checks=CHECKS)

        with contextlib.suppress(Unsatisfiable):  # without parameters no request can be wrong
            attack()
    assert routes > 30, "the description of the API is not complete"


def sent(case: Case, request: schemathesis.Case, credential: str | None) -> Any:
    """Send a request of schemathesis to the application in this process; return the answer."""
    raw = requests.Request(**request.as_transport_kwargs(base_url="http://server")).prepare()
    headers = {name: value for name, value in raw.headers.items() if name.lower() != "authorization"}
    if credential is not None:
        headers["Authorization"] = f"Bearer {credential}"
    return case.client.request(raw.method, raw.url, headers=headers, content=raw.body)


HOSTILE = (2**63, 10**40, -1, 1e308, "\x00", "x" * 5000, None, [], {})


def test_numbers_in_queries_have_bounds(case: Case) -> None:
    job = case.submit(case.requester())
    document = case.admin().get("/api/openapi.json")
    headers = {"Authorization": f"Bearer {case.admin().credential}"}
    for path, method, operation in operations(document):
        url = re.sub(r"\{(\w+)\}", lambda name: "a" * 64 if name[1] == "sha" else job, path)
        named = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
        for name, value in itertools.product(named, HOSTILE):
            params = dict.fromkeys(named, "0") | {name: str(value)}
            answer = case.client.request(method, url, params=params, headers=headers)
            assert str(answer.status_code) in operation["responses"], (method, path, params)


def replaced(value: Any) -> Iterator[Any]:
    """Yield copies of a message, in each of which one part has a hostile value."""
    yield from HOSTILE
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in list(items):
        for other in replaced(inner):
            copy = value.copy()
            copy[key] = other
            yield copy


def test_each_part_of_a_message_may_be_hostile(case: Case) -> None:
    rita, alice = case.requester(), case.provider("hostile")
    case.submit(rita)
    case.match()
    assignment = alice.heartbeat()["assignment"]
    report = {"assignment": assignment, "phase": "training", "records": losses(1.0), "first_record": 0}
    beat = {"report": {**report, "tls_rejections": {"foreign": 1}}, "known": None, "wait": 0}
    messages: list[tuple[Any, str, Any]] = [
        (alice, f"/api/providers/{alice.id}/heartbeat", beat),
        (alice, "/api/providers", offer("hostile").model_dump(mode="json")),
        (rita, "/api/jobs", spec().model_dump(mode="json")),
    ]
    document = case.admin().get("/api/openapi.json")
    for caller, path, message in messages:
        template = path.replace(alice.id, "{provider}")
        allowed = document["paths"][template]["post"]["responses"]
        headers = {"Authorization": f"Bearer {caller.credential}"}
        for body in replaced(message):
            answer = case.client.post(path, json=body, headers=headers)
            assert str(answer.status_code) in allowed, (path, answer.status_code, body)
    case.server.run_matching()
    case.server.run_due()
