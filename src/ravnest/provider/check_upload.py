"""Upload of the files of spot checks to the server, while the worker trains."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ravnest.errors import StageFormatError
from ravnest.http.api import ApiClient
from ravnest.http.transfer import artifact_of, upload
from ravnest.provider.checkpoint_upload import link_file
from ravnest.provider.job_dir import JobDir
from ravnest.schemas.spot_checks import MOST_CHECKS, CheckEvidence
from ravnest.store.forward_evidence import check_path, is_check_name
from ravnest.telemetry import CheckRecord, WorkerRecord


class CheckUploads:
    """Files of one assignment to upload, one at a time, and those that are uploaded. Pure."""

    def __init__(self) -> None:
        self._waiting: deque[CheckRecord] = deque(maxlen=MOST_CHECKS)
        self._running: CheckRecord | None = None
        self.uploaded: tuple[CheckEvidence, ...] = ()
        """Newest files that the server has."""

    def note(self, records: Iterable[WorkerRecord]) -> None:
        """Take records of the worker: files that are complete are to be uploaded."""
        self._waiting.extend(record for record in records if isinstance(record, CheckRecord))

    def begin(self) -> CheckRecord | None:
        """Return the file to upload now, if there is one; ``end`` follows."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        return self._running

    def end(self, uploaded: CheckEvidence | None) -> None:
        """Store the result of an upload; a file that could not be uploaded is left out."""
        self._running = None
        if uploaded is not None:
            self.uploaded = (*self.uploaded, uploaded)[-MOST_CHECKS:]


@dataclass(frozen=True)
class CheckUpload:
    """Upload of a file in the folder of one assignment."""

    api: ApiClient
    job_dir: JobDir
    check: Callable[[], None]
    """Called now and then; raises to end the upload."""

    def run(self, record: CheckRecord) -> CheckEvidence:
        """Upload the file of a record.

        The worker removes old files at any time, and handles data of others: the file is linked first,
        and its name must be that of a check.
        """
        if not is_check_name(record.check):
            raise StageFormatError("the name of a check has other characters than letters and digits")
        node = self.job_dir.read_assignment().node_spec
        path = check_path(self.job_dir.checkpoints / node.name, record.check, record.part)
        folder = self.job_dir.check_uploads
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
        folder.mkdir(parents=True)
        try:
            link_file(path, linked := folder / path.name)
            artifact = artifact_of(linked)
            upload(self.api, {artifact.sha256: linked}, lambda _done, _total: self.check(), paced=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return CheckEvidence(
            check=record.check,
            part=record.part,
            phase=record.phase,
            index=record.index,
            file=artifact,
        )
