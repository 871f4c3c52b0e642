"""Jobs that are submitted again with changes, from the files of an earlier job at the server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ravnest.errors import JobError, ServerRefusedError, StageFormatError
from ravnest.jobs.changed_settings import changed_spec
from ravnest.jobs.model import bytes_of
from ravnest.jobs.tensor_file import TensorFile
from ravnest.schemas.base import Artifact
from ravnest.schemas.job_changes import JobChanges
from ravnest.schemas.jobs import JobSpec, JobState, ResultFile
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.assignments import needed_files
from ravnest.server.db.records import JobRecord, MemberRecord
from ravnest.server.job_service import JobService
from ravnest.server.unit_of_work import UnitOfWorkFactory
from ravnest.split.encoding import stage_from_json
from ravnest.split.graph import StateSpec

_CHUNK = 4 << 20


class ResubmissionService:
    """Submission of jobs from the files of earlier ones; thread-safe."""

    def __init__(self, units: UnitOfWorkFactory, jobs: JobService, artifacts: ArtifactFolder) -> None:
        self._units = units
        self._jobs = jobs
        self._artifacts = artifacts

    def resubmit(self, record: JobRecord, member: MemberRecord, changes: JobChanges) -> str:
        """Queue a job like an earlier one and return its id; it has the same owner.

        Refuse changes that do not fit (422), jobs whose files or weights are gone (409), and whatever
        ``JobService.submit`` refuses.
        """
        with self._units.db.read() as db:
            old = db.jobs.spec(record.id)
            owner = db.members.get(record.owner)
        if owner is None:
            raise ServerRefusedError(
                f"the owner of {record.id} is no member any more: its files cannot be used", 409
            )
        try:
            spec = changed_spec(old, changes)
        except JobError as error:
            raise ServerRefusedError(
                f"{record.id} cannot be submitted like this: {error}", 422
            ) from error
        self._check_files(record, old)
        match changes.start_from:
            case "checkpoint":
                spec = spec.model_copy(update={"resume_from": record.id})
            case "result" | "best" as source:
                weights = self._trained(record, old, source)
                spec = spec.model_copy(
                    update={"model": old.model.model_copy(update={"weights": weights})}
                )
            case "original":
                pass
        return self._jobs.submit(owner, spec, how=_how(record, member, changes))

    def _check_files(self, record: JobRecord, spec: JobSpec) -> None:
        digests = [file.sha256 for file in needed_files(spec)]
        with self._units.db.read() as db:
            missing = set(db.artifact_grants.missing(record.owner, digests))
        missing |= {digest for digest in digests if not self._artifacts.has(digest)}
        if missing:
            raise ServerRefusedError(
                f"{len(missing)} files of {record.id} are not at the server any more: submit the job "
                "from your program, which uploads them again",
                409,
            )

    def _trained(self, record: JobRecord, spec: JobSpec, source: str) -> Artifact:
        """Return a file of all weights with those that a job has trained, as a file of its owner."""
        files = self._result_files(record, source)
        before = spec.model.weights.sha256
        try:
            stages = [_TrainedStage.read(self._artifacts, pair) for pair in _pairs(files)]
            whole = TensorFile.read(self._artifacts.path(before))
            found = self._artifacts.add_changed(
                before, record.owner, lambda copy: _overwrite(copy, whole, stages)
            )
        except (StageFormatError, OSError) as error:
            raise ServerRefusedError(
                f"the trained weights of {record.id} cannot be read: {error}", 409
            ) from error
        with self._units.db.write(self._units.clock.wall()) as db:
            db.artifact_grants.grant(record.owner, [found])
        return found

    def _result_files(self, record: JobRecord, source: str) -> Sequence[ResultFile]:
        job = record.id
        with self._units.db.read() as db:
            if source == "best":
                models = db.best_models.of_job(job)
                files = models[min(models)].files if models else ()
            else:
                result = db.jobs.result(job) if record.state is JobState.DONE else None
                files = () if result is None else result.files
        if not files:
            words = "best model: it needs keep_best" if source == "best" else "trained model"
            raise ServerRefusedError(f"{job} is {record.state} and has no {words}", 409)
        if any(not self._artifacts.has(file.artifact.sha256) for file in files):
            raise ServerRefusedError(f"the trained model of {job} was deleted: it is too old", 409)
        return files


@dataclass(frozen=True)
class _TrainedStage:
    """Trained weights of a stage: its entries in the model, and where their bytes are."""

    state: tuple[StateSpec, ...]
    file: TensorFile

    @classmethod
    def read(cls, artifacts: ArtifactFolder, pair: Mapping[str, ResultFile]) -> _TrainedStage:
        """Read a manifest that was checked when it was uploaded, and the index of the weights."""
        try:
            manifest = json.loads(artifacts.path(pair["json"].artifact.sha256).read_bytes())
            spec = stage_from_json(manifest["stage"])
            weights = pair["safetensors"].artifact
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StageFormatError(f"a trained stage is damaged: {error}") from error
        return cls(spec.state, TensorFile.read(artifacts.path(weights.sha256)))


def _pairs(files: Sequence[ResultFile]) -> list[dict[str, ResultFile]]:
    """Return manifest and weights of each stage, by suffix."""
    found: dict[str, dict[str, ResultFile]] = {}
    for file in files:
        stem, _, suffix = file.name.partition(".")
        found.setdefault(stem, {})[suffix] = file
    return list(found.values())


def _overwrite(copy: Path, whole: TensorFile, stages: Sequence[_TrainedStage]) -> None:
    """Replace the tensors of all weights by the trained ones, byte by byte."""
    with copy.open("rb+") as target:
        for stage in stages:
            with stage.file.path.open("rb") as source:
                for entry in stage.state:
                    trained = stage.file.tensors.get(entry.key)
                    if trained is None:
                        continue  # a frozen weight, which stays as it was
                    place = bytes_of(whole, entry)
                    if (place.dtype, place.shape) != (trained.dtype, trained.shape):
                        raise StageFormatError(f"{entry.key} has another shape or dtype than before")
                    source.seek(trained.begin)
                    target.seek(place.begin)
                    left = trained.size
                    while left:
                        chunk = source.read(min(left, _CHUNK))
                        if not chunk:
                            raise StageFormatError(f"the file ends in the middle of {entry.key}")
                        target.write(chunk)
                        left -= len(chunk)


def _how(record: JobRecord, member: MemberRecord, changes: JobChanges) -> str:
    """Return what is told about a job in its first event."""
    names = ", ".join(changes.given)
    words = [f", like {record.id}"]
    words += [f" with other {names}"] if names else []
    words += [f", from its {changes.start_from}"] if changes.start_from in ("result", "best") else []
    words += [f", as {member.name} asked"] if member.id != record.owner else []
    return "".join(words)
