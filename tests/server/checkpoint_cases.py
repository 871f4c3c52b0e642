"""Checkpoints that providers of a test upload."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

import msgspec
from server_cases import Caller, Case

from ravnest.server.complete_checkpoints import complete_checkpoints
from ravnest.store.checkpoint import FORMAT, VERSION, CheckpointManifest, StoredTensor
from ravnest.store.plain_data import encode
from ravnest.telemetry import CheckpointRecord
from ravnest.types import CheckpointId

PORT = 9000


def provider(case: Case, name: str, number: int, **changes: Any) -> Caller:
    address = f"127.0.0.1:{PORT + number}"
    return case.provider(name, **{"compute": 100.0 - number, "address": address, **changes})


def training_pair(case: Case, **changes: Any) -> tuple[Caller, str, Caller, Caller]:
    """Return a requester, a job, and the providers of its Root and its Leaf, which train."""
    rita = case.requester()
    alice, bob = provider(case, "alice", 0), provider(case, "bob", 1)
    job = case.submit(rita, **changes)
    case.match()
    for each in (alice, bob):
        each.report("fetched")
    for each in (alice, bob):
        each.report("training")
    return rita, job, alice, bob


def took(update: int, phase: int = 0) -> dict[str, Any]:
    """Return the record of a checkpoint."""
    return asdict(CheckpointRecord(update, phase=phase, bytes=10, seconds=0.1))


def files(stage: int, update: int, **changes: Any) -> tuple[bytes, bytes]:
    """Return the contents of a checkpoint's tensors and its manifest."""
    tensors = changes.pop("tensors", f"tensors of stage {stage} after {update}".encode())
    fields: dict[str, Any] = {
        "plan": "plan",
        "run": "run",
        "node": stage,
        "cluster": 0,
        "stage": stage,
        "stages": 2,
        "id": CheckpointId(update, 0),
        "tensors": {"w": StoredTensor("w")},
        "progress": encode({"updates": {"done": update}}),
        "sha256": hashlib.sha256(tensors).hexdigest(),
        "size": len(tensors),
    }
    manifest = CheckpointManifest(**(fields | changes))
    data = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(manifest)}
    return tensors, json.dumps(data).encode()


def uploaded(caller: Caller, stage: int, update: int, **changes: Any) -> dict[str, Any]:
    """Upload a checkpoint; return how a report names it."""
    named = changes.pop("named", {})
    contents = files(stage, update, **changes)
    tensors, manifest = (
        {"sha256": caller.upload(content), "size": len(content)} for content in contents
    )
    own = {"run": "run", "update": update, "phase": 0, "stage": stage, "cluster": 0, "plan": "plan"}
    known = {name: changes[name] for name in own if name in changes}
    return {**own, **known, "tensors": tensors, "manifest": manifest, **named}


def upload(caller: Caller, stage: int, update: int, **changes: Any) -> dict[str, Any]:
    """Upload a checkpoint and report it."""
    named = uploaded(caller, stage, update, **changes)
    caller.report("training", checkpoints=[named])
    return named


def complete(case: Case, job: str) -> list[tuple[int, int]]:
    """Return updates and clusters of the complete checkpoints of a job, newest first."""
    with case.server.db.read() as db:
        found = complete_checkpoints(db.checkpoints.of_job(job))
    return [(each.id.update, each.cluster) for each in found]
