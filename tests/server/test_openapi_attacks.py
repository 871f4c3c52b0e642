"""Random requests from the description of the API: no error of the server, no undocumented status."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_cases import Case, losses, offer, opened, spec
from starlette.testclient import TestClient

from ravnest.schemas.auth import ApiRole
from ravnest.server.rate_limits import Rate
from ravnest.server.settings import ServerSettings

few = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**40, 1.5, 1e308])
TEXTS = st.one_of(
    st.sampled_from(["", "0", "a" * 64, "job-1", "nan", "..", "\x00", "💥", "%", "x" * 5000]),
    st.text(max_size=8),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
METHODS = ("get", "post", "put", "delete")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    limits = ServerSettings(requests=Rate(1e9, 1e9), longest_wait=0.0, unfinished_jobs=10_000)
    with opened(tmp_path_factory.mktemp("server"), settings=limits) as found:
        found.client = TestClient(found.client.app, raise_server_exceptions=False)
        yield found


class Description:
    """The description of the API, and strategies for what it describes."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def values(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """Return a strategy for values of a schema, and now and then for other ones."""
        return st.one_of(self._values(schema), self._values(schema), self._values(schema), ANYTHING)

    def _values(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return st.deferred(lambda: self._values(self.document["components"]["schemas"][name]))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return st.one_of(*(self._values(each) for each in schema[word]))
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        return self._plain(schema)

    def _plain(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        match schema.get("type"):
            case "object":
                known = schema.get("properties", {})
                required = schema.get("required", [])
                return st.fixed_dictionaries(
                    {name: self.values(each) for name, each in known.items() if name in required},
                    optional={n: self.values(each) for n, each in known.items() if n not in required},
                )
            case "array":
                return st.lists(self.values(schema.get("items", {})), max_size=3)
            case "integer":
                least = int(schema.get("minimum", -5))
                return st.one_of(NUMBERS, st.integers(least, least + 20))
            case "number":
                return st.one_of(st.floats(0.1, 60.0), NUMBERS)
            case "string":
                return st.from_regex(schema["pattern"]) if "pattern" in schema else TEXTS
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
        return ANYTHING


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, found in document["paths"].items():
        for method in METHODS:
            if method in found:
                yield path, method, found[method]


def test_random_requests_are_answered_as_described(case: Case) -> None:
    members = [case.member(role) for role in ApiRole if role is not ApiRole.ADMIN] + [case.admin()]
    alice = case.provider()
    job = case.submit(case.requester())
    case.match()
    document = case.admin().get("/api/openapi.json")
    description = Description(document)
    known = itertools.cycle((job, alice.id, "a" * 64, f"{job}-0"))
    problems: set[str] = set()

    def attack(path: str, method: str, operation: dict[str, Any]) -> None:
        parameters = operation.get("parameters", [])
        query = {
            each["name"]: description.values(each["schema"])
            for each in parameters
            if each["in"] == "query"
        }
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        body = description.values(content["schema"]) if content else st.none()

        @few
        @given(
            st.sampled_from([members[-1], members[-1], alice, *members]),
            st.one_of(TEXTS, st.just(None), st.just(None)),
            st.one_of(st.fixed_dictionaries(query), st.fixed_dictionaries({}, optional=query)),
            body,
        )
        def run(caller: Any, text: str | None, params: dict[str, Any], json: Any) -> None:
            place = next(known) if text is None else text.replace("/", "")
            url = re.sub(r"\{\w+\}", lambda _: quoted(place), path)
            answer = case.client.request(
                method,
                url,
                params={name: str(value) for name, value in params.items()},
                json=json,
                headers={"Authorization": f"Bearer {caller.credential}"},
            )
            allowed = {int(each) for each in operation["responses"]}
            if answer.status_code not in allowed and "{" in path and place in ("", ".", ".."):
                return  # another path
            if answer.status_code not in allowed:
                problems.add(
                    f"{method} {path}: {answer.status_code} {params} {str(json)[:300]} {place!r}"
                )

        run()

    for path, method, operation in operations(document):
        attack(path, method, operation)
    assert not problems, "\n".join(sorted(problems)[:20])


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


def quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "replace"))
