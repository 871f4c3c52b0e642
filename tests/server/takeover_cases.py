"""Steps of tests in which providers are lost and replaced."""

from dataclasses import asdict
from typing import Any

from server_cases import Caller, Case

from ravnest.telemetry import PhaseRecord


def view(rita: Caller, job: str) -> dict[str, Any]:
    """Return a job as its owner sees it."""
    found: dict[str, Any] = rita.get(f"/api/jobs/{job}")
    return found


def recoveries(rita: Caller, job: str) -> list[str]:
    """Return the reasons of a job's recoveries."""
    events = rita.get(f"/api/jobs/{job}/events")
    return [each["reason"] for each in events if each["kind"] == "recovery"]


def state_of(case: Case, caller: Caller) -> str:
    """Return a provider's state."""
    found = case.admin().get("/api/providers")
    return next(str(each["state"]) for each in found if each["id"] == caller.id)


def leave(caller: Caller) -> None:
    """Let a provider leave at once."""
    caller.call("DELETE", f"/api/providers/{caller.id}?reason=gone")


def phase(name: Any) -> dict[str, Any]:
    """Return the record of a phase that begins."""
    return asdict(PhaseRecord(name, epoch=0))


def finish(caller: Caller) -> None:
    """Report the end of training with a result."""
    content = f"trained by {caller.id}".encode()
    artifact = {"sha256": caller.upload(content), "size": len(content)}
    caller.report("finished", result=[{"name": "node_0.safetensors", "artifact": artifact}])
