"""Upload of a node's checkpoints to the server, while its worker trains.

The worker removes old checkpoints at any time, so the files are linked into a folder of their own first.
The worker runs other people's graphs: links that it may have made instead of files are not followed.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ravnest.errors import StageFormatError
from ravnest.http.api import ApiClient
from ravnest.http.transfer import artifact_of, upload
from ravnest.provider.job_dir import JobDir
from ravnest.schemas.checkpoints import CheckpointOrder, UploadedCheckpoint
from ravnest.store.checkpoint import KEPT, CheckpointFolder
from ravnest.types import CheckpointId

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointUpload:
    """Upload of the checkpoints in the folder of one assignment."""

    api: ApiClient
    job_dir: JobDir
    check: Callable[[], None]
    """Called now and then; raises to end the upload."""

    def run(self, order: CheckpointOrder) -> tuple[UploadedCheckpoint, ...]:
        """Upload what the order names; return nothing if the checkpoint that it waits for is not there.

        Checkpoints that are damaged, or removed meanwhile, are left out.
        """
        node = self.job_dir.read_assignment().node_spec
        own = CheckpointFolder(self.job_dir.checkpoints / node.name)
        if not order.rescue:
            found = [
                each
                for each in own.ids()
                if each.update >= order.at_least and each.phase >= order.phases
            ]
            return tuple(self._upload(own, found[:1], paced=True))
        uploaded = self._upload(own, own.ids()[-KEPT:])
        for stage in order.stages:
            replicas = CheckpointFolder(own.path / f"replica_of_stage_{stage}")
            uploaded += self._upload(replicas, replicas.ids()[-KEPT:])
        return tuple(uploaded)

    def _upload(
        self, folder: CheckpointFolder, checkpoints: list[CheckpointId], *, paced: bool = False
    ) -> list[UploadedCheckpoint]:
        """Upload checkpoints of a folder, the newest first; ``paced``: beside training."""
        uploaded = []
        for checkpoint in reversed(checkpoints):
            try:
                with _Linked(folder, self.job_dir.uploads, checkpoint) as linked:
                    uploaded.append(self._upload_one(linked, checkpoint, paced))
            except (StageFormatError, FileNotFoundError) as error:
                logger.info("a checkpoint is not uploaded: %s", error)
        return uploaded

    def _upload_one(
        self, linked: CheckpointFolder, checkpoint: CheckpointId, paced: bool
    ) -> UploadedCheckpoint:
        manifest = linked.manifest(checkpoint)
        tensors, description = linked.tensors_path(checkpoint), linked.manifest_path(checkpoint)
        result = UploadedCheckpoint(
            run=manifest.run,
            taken=manifest.attempt,
            update=checkpoint.update,
            phase=checkpoint.phase,
            stage=manifest.stage,
            cluster=manifest.cluster,
            plan=manifest.plan,
            tensors=artifact_of(tensors),
            manifest=artifact_of(description),
        )
        if result.tensors.sha256 != manifest.sha256:
            raise StageFormatError(f"{tensors} is damaged: its manifest has another digest")
        files = {result.tensors.sha256: tensors, result.manifest.sha256: description}
        upload(self.api, files, lambda _done, _total: self.check(), paced=paced)
        return result


class _Linked:
    """The two files of a checkpoint under further names, while they are uploaded."""

    def __init__(self, folder: CheckpointFolder, target: Path, checkpoint: CheckpointId) -> None:
        self._from, self._target = folder, target
        self._checkpoint = checkpoint

    def __enter__(self) -> CheckpointFolder:
        shutil.rmtree(self._target, ignore_errors=True)  # left by a killed process
        self._target.mkdir(parents=True)
        linked = CheckpointFolder(self._target)
        for path in (
            self._from.tensors_path(self._checkpoint),
            self._from.manifest_path(self._checkpoint),
        ):
            link_file(path, self._target / path.name)
        return linked

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._target, ignore_errors=True)


def link_file(path: Path, target: Path) -> None:
    """Make ``target`` another name of a regular file, or a copy where the disk has no hard links."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise StageFormatError(f"{path} is not a file")
    try:
        os.link(path, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, target, follow_symlinks=False)
    if not stat.S_ISREG(target.lstat().st_mode):
        raise StageFormatError(f"{path} is not a file")
