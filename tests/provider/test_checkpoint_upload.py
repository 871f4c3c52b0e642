"""Uploads of checkpoints by a provider: which ones, and what the worker cannot make it send."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from node_files import node_file

from ravnest.http.api import ApiClient
from ravnest.provider import checkpoint_upload
from ravnest.provider.checkpoint_orders import CheckpointOrders
from ravnest.provider.checkpoint_upload import CheckpointUpload
from ravnest.provider.job_dir import JobDir
from ravnest.schemas.base import Artifact
from ravnest.schemas.checkpoints import MOST_UPLOADED, CheckpointOrder, UploadedCheckpoint
from ravnest.schemas.jobs import NamedComponent, TrainingSpec
from ravnest.schemas.providers import Assignment, DataShare
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest, StoredTensor
from ravnest.telemetry import CheckpointRecord, QueueRecord
from ravnest.types import CheckpointId

FILE = Artifact(sha256="0" * 64, size=1)


def write(folder: CheckpointFolder, stage: int, *updates: int, phase: int = 0) -> None:
    for update in updates:
        tensors = {"state/w": torch.full((3,), float(update + 100 * stage))}
        checkpoint = CheckpointId(update, phase)
        manifest = CheckpointManifest(
            "plan", "run", stage, 0, stage, 3, checkpoint, {"w": StoredTensor("w")}, {}
        )
        folder.commit(folder.write_tensors(checkpoint, tensors), manifest)


class Sent:
    """Server that stores what is uploaded."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.paced: list[bool] = []

    def upload(
        self, _api: object, files: Mapping[str, Path], _progress: object, *, paced: bool = False
    ) -> None:
        self.paced.append(paced)
        self.files |= {digest: path.read_bytes() for digest, path in files.items()}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    server = Sent()
    monkeypatch.setattr(checkpoint_upload, "upload", server.upload)
    return server


@pytest.fixture
def job_dir(tmp_path: Path) -> JobDir:
    found = JobDir(tmp_path)
    training = TrainingSpec(optimizer=NamedComponent(name="SGD"), loss=NamedComponent(name="MSELoss"))
    found.write_assignment(
        Assignment(
            id="a",
            job="job",
            node=1,
            node_spec=node_file(1, stages=3),
            stage=FILE,
            weights=FILE,
            train=DataShare(samples=1, total=1),
            training=training,
            tls=False,
        )
    )
    return found


def own(job_dir: JobDir) -> CheckpointFolder:
    return CheckpointFolder(job_dir.checkpoints / "node_1")


def replicas(job_dir: JobDir, stage: int) -> CheckpointFolder:
    return CheckpointFolder(own(job_dir).path / f"replica_of_stage_{stage}")


def run(job_dir: JobDir, **order: Any) -> list[tuple[int, int]]:
    """Return stages and updates of what an order uploads."""
    api: ApiClient = None  # type: ignore[assignment] - the upload is replaced
    found = CheckpointUpload(api, job_dir, lambda: None).run(CheckpointOrder(**order))
    return [(each.stage, each.update) for each in found]


def test_the_first_checkpoint_from_an_update_on_is_uploaded(job_dir: JobDir, sent: Sent) -> None:
    assert run(job_dir, at_least=1) == [], "there is none yet"
    write(own(job_dir), 1, 4, 7)
    assert run(job_dir, at_least=4) == [(1, 4)]
    assert run(job_dir, at_least=5) == [(1, 7)]
    assert run(job_dir, at_least=8) == []
    checkpoint = CheckpointId(7, 0)
    for path in (own(job_dir).tensors_path(checkpoint), own(job_dir).manifest_path(checkpoint)):
        assert sent.files[hashlib.sha256(path.read_bytes()).hexdigest()] == path.read_bytes()
    assert not job_dir.uploads.exists(), "the further names are removed"


def test_the_first_checkpoint_after_the_end_of_a_phase_is_uploaded(job_dir: JobDir, sent: Sent) -> None:
    write(own(job_dir), 1, 4, 7)
    assert run(job_dir, at_least=4, phases=1) == [], "the phase is not over"
    write(own(job_dir), 1, 8, phase=1)
    assert run(job_dir, at_least=4, phases=1) == [(1, 8)]
    assert sent.files


def test_a_rescue_uploads_everything_the_newest_first(job_dir: JobDir, sent: Sent) -> None:
    write(own(job_dir), 1, 4, 7)
    write(replicas(job_dir, 0), 0, 4, 7)
    write(replicas(job_dir, 2), 2, 4)
    assert run(job_dir, rescue=True, stages=(2,)) == [(1, 7), (1, 4), (2, 4)]
    assert run(job_dir, rescue=True, stages=(0, 2)) == [(1, 7), (1, 4), (0, 7), (0, 4), (2, 4)]
    assert sent.files


def test_uploads_leave_the_connection_to_training_unless_it_has_stopped(
    job_dir: JobDir, sent: Sent
) -> None:
    write(own(job_dir), 1, 4)
    run(job_dir, at_least=4)
    run(job_dir, rescue=True)
    assert sent.paced == [True, False]


def test_a_damaged_checkpoint_is_left_out(job_dir: JobDir, sent: Sent) -> None:
    write(own(job_dir), 1, 4, 7)
    path = own(job_dir).tensors_path(CheckpointId(7, 0))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert run(job_dir, rescue=True) == [(1, 4)]
    assert hashlib.sha256(content).hexdigest() not in sent.files


def test_a_link_of_the_worker_is_not_followed(job_dir: JobDir, sent: Sent, tmp_path: Path) -> None:
    """The worker runs graphs of strangers; it must not make the provider send other files."""
    secret = tmp_path / "key"
    secret.write_bytes(b"secret")
    write(own(job_dir), 1, 4)
    for path in (
        own(job_dir).tensors_path(CheckpointId(4, 0)),
        own(job_dir).manifest_path(CheckpointId(4, 0)),
    ):
        kept = path.read_bytes()
        path.unlink()
        path.symlink_to(secret)
        assert run(job_dir, at_least=1) == []
        path.unlink()
        path.write_bytes(kept)
    assert b"secret" not in sent.files.values()
    assert run(job_dir, at_least=1) == [(1, 4)]


# Orders

ORDER = CheckpointOrder(at_least=5)


def uploaded(update: int) -> UploadedCheckpoint:
    return UploadedCheckpoint(
        run="run",
        update=update,
        phase=0,
        stage=0,
        cluster=0,
        plan="plan",
        tensors=FILE,
        manifest=FILE,
    )


def test_an_order_waits_for_a_checkpoint_and_is_done_once() -> None:
    orders = CheckpointOrders()
    assert orders.begin() is None
    orders.want(ORDER)
    assert orders.begin() == ORDER
    assert orders.begin() is None, "one at a time"
    orders.end(ORDER, (), is_done=False)
    assert orders.begin() is None, "nothing has changed"
    orders.note([QueueRecord(0, 0, 0)])
    assert orders.begin() is None
    orders.note([CheckpointRecord(5, 0, 10, 0.1)])
    assert orders.begin() == ORDER
    orders.end(ORDER, (uploaded(5),), is_done=True)
    orders.want(ORDER)
    assert orders.begin() is None
    assert (orders.done, orders.uploaded) == (ORDER, (uploaded(5),))
    orders.want(CheckpointOrder(at_least=5, rescue=True))
    assert orders.begin() is not None


def test_reports_name_the_newest_uploads() -> None:
    orders = CheckpointOrders()
    for update in range(20):
        order = CheckpointOrder(at_least=update)
        orders.want(order)
        assert orders.begin() == order
        orders.end(order, (uploaded(update),), is_done=True)
    assert [each.update for each in orders.uploaded] == list(range(20 - MOST_UPLOADED, 20))
