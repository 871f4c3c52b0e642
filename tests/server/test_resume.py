"""Jobs that continue an ended one: over the HTTP API, and what does not fit."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import complete, provider, training_pair, upload
from safetensors.torch import save
from server_cases import Caller, Case, artifact, opened, spec

from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobSpec, ModelFiles, NamedComponent
from ravnest.server import job_resume
from ravnest.server.resume_state import same_loader
from ravnest.server.settings import ServerSettings

SETTINGS = ServerSettings(unused_files_kept=0.0, lost_after=1e9)


@pytest.fixture
def case(tmp_path: Path) -> Any:
    with opened(tmp_path, settings=SETTINGS) as found:
        yield found


def cancelled(case: Case, update: int = 7) -> tuple[Caller, str, Caller, Caller]:
    """Return a job with a checkpoint that its requester has cancelled, and its members."""
    rita, job, alice, bob = training_pair(case)
    upload(alice, 0, update)
    upload(bob, 1, update)
    rita.post(f"/api/jobs/{job}/cancel")
    alice.heartbeat()
    bob.heartbeat()
    return rita, job, alice, bob


def with_training(**changes: Any) -> JobSpec:
    given = spec()
    return given.model_copy(update={"training": given.training.model_copy(update=changes)})


def resumed(given: JobSpec, job: str) -> JobSpec:
    return given.model_copy(update={"resume_from": job})


def test_a_cancelled_job_is_resumed_without_an_upload(case: Case) -> None:
    rita, job, alice, bob = cancelled(case)
    case.server.run_due()
    new = rita.post(f"/api/jobs/{job}/resume", status=201)["id"]
    assert new != job
    assert complete(case, new) == [(7, 0)]
    case.match()
    assert alice.heartbeat()["assignment"] == f"{new}-0"
    start = case.planner.starts[-1]
    assert start is not None
    assert (start.checkpoints[0].id.update, start.restart_epoch) == (7, False)
    assert start.optimizer is None
    events = rita.get(f"/api/jobs/{new}/events")
    assert events[0]["reason"] == f"submitted by rita, to continue {job}"
    for each in (alice, bob):
        each.report("fetched")
    for each in (alice, bob):
        each.report("training")
    upload(alice, 0, 9)
    upload(bob, 1, 9)
    assert complete(case, new) == [(9, 0)], "its own checkpoint replaces the one that it got"
    assert complete(case, job) == [(7, 0)]


def test_the_checkpoint_of_a_resumed_job_outlives_the_ended_one(tmp_path: Path) -> None:
    settings = ServerSettings(ended_jobs_resumable=0, unused_files_kept=0.0, lost_after=1e9)
    with opened(tmp_path, settings=settings) as case:
        rita, job, alice, bob = training_pair(case)
        named = upload(alice, 0, 7)
        upload(bob, 1, 7)
        case.planner.needs = 9
        rita.post(f"/api/jobs/{job}/cancel")
        new = rita.post(f"/api/jobs/{job}/resume", status=201)["id"]
        case.server.run_due()
        assert complete(case, job) == []
        assert complete(case, new) == [(7, 0)]
        assert case.server.artifacts.has(named["tensors"]["sha256"])


def test_only_ended_jobs_of_the_same_owner_with_a_checkpoint_can_be_resumed(case: Case) -> None:
    rita, job, alice, _ = training_pair(case)
    upload(alice, 0, 7)
    refused = rita.post(f"/api/jobs/{job}/resume", status=409)
    assert "is training: cancel it before you resume it" in refused["detail"]
    rita.post(f"/api/jobs/{job}/cancel")
    refused = rita.post(f"/api/jobs/{job}/resume", status=409)
    assert "has no complete checkpoint" in refused["detail"]
    other = case.requester("rob")
    other.post(f"/api/jobs/{job}/resume", status=403)
    refused = other.post("/api/jobs", resumed(spec(), job), 404)
    assert refused["detail"] == f"you have no job {job} to resume"
    rita.post("/api/jobs", resumed(spec(), "job-00000000"), 404)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (with_training(optimizer=NamedComponent(name="Adam")), "its optimizer is SGD, not Adam"),
        (with_training(scheduler=NamedComponent(name="StepLR")), "scheduler must be the same"),
        (with_training(val_freq=2), "validations must be as often as before"),
    ],
)
def test_settings_that_do_not_fit_the_state_are_refused(case: Case, changed: JobSpec, why: str) -> None:
    rita, job, _, _ = cancelled(case)
    refused = rita.post("/api/jobs", resumed(changed, job), 422)
    assert refused["detail"].startswith(f"{job} cannot be resumed: ")
    assert why in refused["detail"]


def test_other_parameters_of_the_optimizer_are_used(case: Case) -> None:
    rita, job, _, _ = cancelled(case)
    optimizer = NamedComponent(name="SGD", params={"lr": 0.5})
    rita.post("/api/jobs", resumed(with_training(optimizer=optimizer, epochs=9), job), 201)
    case.match()
    start = case.planner.starts[-1]
    assert start is not None
    assert (start.optimizer, start.restart_epoch) == (optimizer, False)


def test_other_batches_begin_the_epoch_anew(case: Case) -> None:
    rita, job, _, _ = cancelled(case)
    new = rita.post("/api/jobs", resumed(with_training(batch_size=2), job), 201)["id"]
    case.match()
    start = case.planner.starts[-1]
    assert start is not None
    assert start.restart_epoch
    said = [each["reason"] for each in rita.get(f"/api/jobs/{new}/events")]
    assert any("begins anew, because its data or batches changed" in text for text in said)


def weights(rita: Caller, **shapes: tuple[int, ...]) -> ModelFiles:
    content = save({name: torch.zeros(shape) for name, shape in shapes.items()})
    file = Artifact(sha256=rita.upload(content), size=len(content))
    return ModelFiles(units=artifact("units"), weights=file)


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"a": (2, 3)}, "the model has no b, which the earlier one has"),
        ({"a": (2, 3), "b": (3,), "c": (1,)}, "the earlier model has no c"),
        ({"a": (2, 4), "b": (3,)}, "a has the shape [2, 4] (F32), before [2, 3] (F32)"),
    ],
)
def test_a_model_with_other_weights_is_refused(
    case: Case, shapes: dict[str, tuple[int, ...]], why: str
) -> None:
    rita = case.requester()
    alice = provider(case, "alice", 0)
    old = spec().model_copy(update={"model": weights(rita, a=(2, 3), b=(3,))})
    job = rita.post("/api/jobs", old, 201)["id"]
    case.match()
    alice.report("fetched")
    alice.report("training")
    upload(alice, 0, 7, stages=1)
    rita.post(f"/api/jobs/{job}/cancel")
    new = resumed(spec().model_copy(update={"model": weights(rita, **shapes)}), job)
    assert rita.post("/api/jobs", new, 422)["detail"] == f"{job} cannot be resumed: {why}"
    same = resumed(spec().model_copy(update={"model": weights(rita, a=(2, 3), b=(3,))}), job)
    rita.post("/api/jobs", same, 201)


def test_what_forms_the_batches() -> None:
    assert same_loader(spec(), with_training(epochs=9, compression="fp16"))
    for changes in ({"seed": 1}, {"shuffle": False}, {"drop_last": True}, {"update_frequency": 2}):
        assert not same_loader(spec(), with_training(**changes))


def test_files_are_not_read_while_others_wait(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of two models were read in the transaction of a submission."""
    read: list[bool] = []

    def others_write(*_: object) -> str:
        def write() -> None:
            with case.server.db.write(1.0):
                read.append(True)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(5)
        assert read, "the transaction of the submission is open"
        return ""

    monkeypatch.setattr(job_resume, "weights_misfit", others_write)
    rita, job, _, _ = cancelled(case)
    rita.post(f"/api/jobs/{job}/resume", status=201)
    assert len(read) == 1
