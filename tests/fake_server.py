"""A server that knows one job and answers as it is told, over real HTTP on this machine."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from fake_files import FakeFiles

from ravnest.schemas.jobs import EventView, JobProgress, JobResult, JobState, JobView
from ravnest.schemas.providers import ProviderView

JOB = "job-1"


def view(state: JobState, reason: str = "because", changed: float = 1.0, **progress: Any) -> JobView:
    return JobView(
        id=JOB,
        name="digits",
        owner="me",
        state=state,
        reason=reason,
        created=1.0,
        changed=changed,
        progress=JobProgress(epochs=3, **progress),
    )


class FakeServer:
    """What it shows of its job changes with each request for news."""

    def __init__(self) -> None:
        self.files = FakeFiles()
        self.views = [view(JobState.SUBMITTED)]
        self.events: list[EventView] = []
        self.providers: list[ProviderView] = []
        self.result: JobResult | None = None
        self.refusals: dict[str, tuple[int, str]] = {}
        """By ``METHOD path``: how the request is answered instead."""
        self.asked: list[str] = []
        self.specs: list[dict[str, Any]] = []
        self.credentials: set[str | None] = set()
        self.url = ""

    def answer(self, request: httpx.Request) -> httpx.Response:
        asked = f"{request.method} {request.url.path}"
        self.asked.append(asked)
        self.credentials.add(request.headers.get("Authorization"))
        if asked in self.refusals:
            status, detail = self.refusals[asked]
            return httpx.Response(status, json={"detail": detail})
        if request.url.path.startswith("/api/artifacts/"):
            return self.files.answer(request)
        return self._route(asked, request)

    def _route(self, asked: str, request: httpx.Request) -> httpx.Response:
        match asked:
            case "GET /api/health":
                return httpx.Response(200, json={})
            case "POST /api/join":
                joined = {"id": "m", "role": "requester", "credential": "credential"}
                return httpx.Response(200, json=joined)
            case "POST /api/jobs":
                self.specs.append(json.loads(request.content))
                return httpx.Response(201, json={"id": JOB})
            case "GET /api/jobs":
                return _json(self.views[:1])
            case "GET /api/providers":
                return _json(self.providers)
        return self._route_of_job(asked.replace(f"/api/jobs/{JOB}", "JOB"), request)

    def _route_of_job(self, asked: str, request: httpx.Request) -> httpx.Response:
        params = request.url.params
        match asked:
            case "GET JOB":
                return _json(self.views[0])
            case "GET JOB/wait":
                assert float(params["changed"]) == self.views[0].changed
                del self.views[0]
                return _json(self.views[0])
            case "GET JOB/events":
                return _json([event for event in self.events if event.sequence > int(params["after"])])
            case "GET JOB/losses":
                first = int(params["first"])
                shown = {
                    "first": first,
                    "updates": [0, 1][first:],
                    "losses": [2.0, 1.0][first:],
                    "validations": [],
                }
                return httpx.Response(200, json=shown)
            case "POST JOB/cancel":
                return httpx.Response(204)
            case "GET JOB/result" if self.result is not None:
                return _json(self.result)
        return httpx.Response(404, json={"detail": f"there is no {request.url.path}"})

    @contextmanager
    def running(self) -> Iterator["FakeServer"]:
        """Answer at ``url`` while in here."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                address = f"http://server{self.path}"
                request = httpx.Request(
                    self.command, address, headers=self.headers.items(), content=body
                )
                answer = fake.answer(request)
                content = answer.read()
                self.send_response(answer.status_code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = _any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _json(value: Any) -> httpx.Response:
    shown = [item.model_dump(mode="json") for item in value] if isinstance(value, list) else None
    return httpx.Response(200, json=value.model_dump(mode="json") if shown is None else shown)
