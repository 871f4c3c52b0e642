"""Upload of the best model of a cluster so far, while its worker trains.

The worker runs other people's graphs: links that it may have made instead of files are not followed. It
replaces the files at any time. They are described by what they are when they are read, and
the model is left out if another one has taken its place meanwhile.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from ravnest.errors import StageFormatError
from ravnest.http.api import ApiClient
from ravnest.http.transfer import artifact_of, upload
from ravnest.provider.job_dir import JobDir
from ravnest.schemas.jobs import BestFiles, ResultFile
from ravnest.store.best_model import BestModelFolder


def _check_own(path: Path, folder: Path) -> None:
    """Raise ``StageFormatError`` unless a path is a file below the folder of trained stages."""
    below = path.resolve().is_relative_to(folder.resolve())
    if not below or not stat.S_ISREG(path.lstat().st_mode):
        raise StageFormatError(f"{path} is not a file of this job")


def upload_best(
    api: ApiClient, job_dir: JobDir, check: Callable[[], None], *, paced: bool
) -> BestFiles | None:
    """Upload the best model in the folder of an assignment and return its files; None without one.

    ``check`` is called now and then and raises to end the upload, ``paced``: beside training.
    ``StageFormatError`` if the model was replaced meanwhile: another call uploads the next one.
    """
    folder = BestModelFolder(job_dir.trained, job_dir.read_assignment().node_spec.cluster)
    best = folder.read()
    if best is None:
        return None
    paths = sorted(folder.stages.glob("node_*"))
    for path in paths:
        _check_own(path, job_dir.trained)
    files = {path: artifact_of(path) for path in paths}
    if folder.read() != best:
        raise StageFormatError("another best model has taken its place")
    by_digest = {artifact.sha256: path for path, artifact in files.items()}
    upload(api, by_digest, lambda _done, _total: check(), paced=paced)
    return BestFiles(
        epoch=best.epoch,
        metric=best.metric,
        value=best.value,
        files=tuple(ResultFile(name=path.name, artifact=files[path]) for path in paths),
    )
