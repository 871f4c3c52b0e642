"""File transfer to and from a server, by digest; an interrupted transfer is resumed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

from ravnest.errors import ServerError, ServerRefusedError
from ravnest.http.api import ApiClient, is_temporary, pause_after
from ravnest.http.retry import RetryPolicy
from ravnest.http.upload_pacer import UploadPacer
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import MissingArtifacts, UploadStatus
from ravnest.store.files import sha256_of

Progress = Callable[[int, int], None]
"""Called with the bytes transferred so far and the total."""

_PART = 32 << 20
"""Most bytes of a request; servers and proxies may refuse longer ones."""
_CHUNK = 1 << 20
TRANSFER_RETRY = RetryPolicy(tries=10)
"""Enough tries for a server that takes seconds to notice a broken connection and to accept a new one."""
_DIGESTS = 1000
"""Most digests of a request for the missing ones."""


def upload(
    api: ApiClient,
    files: Mapping[str, Path],
    progress: Progress | None = None,
    retry: RetryPolicy = TRANSFER_RETRY,
    *,
    paced: bool = False,
) -> None:
    """Upload those of ``files`` (by sha256) that the server does not have.

    ``paced``: in small parts with pauses, because training needs the connection.
    Raises ``ServerUnreachableError`` if the server stays unreachable; another call continues from there.
    """
    missing = {digest: files[digest] for digest in missing_of(api, files)}
    total = sum(path.stat().st_size for path in missing.values())
    before = 0
    report = progress or _no_progress
    report(0, total)
    for digest, path in missing.items():
        one = _Upload(api, digest, path, retry, UploadPacer(time.monotonic()) if paced else None)
        one.run(partial(_report_total, report, before, total))
        before += one.size


def missing_of(api: ApiClient, digests: Mapping[str, object]) -> list[str]:
    """Return the digests of the artifacts that the server lacks, in the order given."""
    names = list(digests)
    missing: list[str] = []
    for start in range(0, len(names), _DIGESTS):
        asked = MissingArtifacts(digests=tuple(names[start : start + _DIGESTS]))
        answer = api.post("/api/artifacts/missing", asked, MissingArtifacts, idempotent=True)
        missing += [digest for digest in asked.digests if digest in set(answer.digests)]
    return missing


class _Upload:
    """Upload of one file in parts, each from the position that the server has reached."""

    def __init__(
        self, api: ApiClient, digest: str, path: Path, retry: RetryPolicy, pacer: UploadPacer | None
    ) -> None:
        self._api = api
        self._pacer = pacer
        self._retry = retry
        self._route = f"/api/artifacts/{digest}/upload"
        self._path = path
        self.size = path.stat().st_size

    def run(self, report: Callable[[int], None]) -> None:
        """Send the file; ``report`` is called with the bytes sent so far."""
        pauses = _Pauses(self._retry)
        offset = self._received()
        while True:
            try:
                offset = self._send(offset, report)  # an empty part makes the server check the whole
            except ServerError as error:
                moved = isinstance(error, ServerRefusedError) and error.status == 409
                if not moved and not is_temporary(error):
                    raise
                reached = self._received()
                if moved and reached == self.size:
                    return
                if reached > offset:
                    pauses.restart()
                pauses.wait(error)
                offset = reached
            else:
                if offset == self.size:
                    return
                pauses.restart()

    def _received(self) -> int:
        """Return the bytes that the server has; all of them if it has the artifact."""
        return min(self.size, self._api.get(self._route, UploadStatus).received)

    def _send(self, offset: int, report: Callable[[int], None]) -> int:
        pacer, began = self._pacer, time.monotonic()
        stop = min(self.size, offset + (_PART if pacer is None else pacer.part))
        params = {"offset": offset, "size": self.size}
        self._api.put_bytes(self._route, self._read(offset, stop, report), stop - offset, params=params)
        report(stop)
        if pacer is not None:
            now = time.monotonic()
            self._retry.sleep(pacer.sent(stop - offset, now - began, self.size - stop, now))
        return stop

    def _read(self, start: int, stop: int, report: Callable[[int], None]) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(start)
            while start < stop:
                chunk = file.read(min(_CHUNK, stop - start))
                if not chunk:
                    raise ServerError(f"{self._path} became shorter during the upload")
                yield chunk
                start += len(chunk)
                report(start)


def download(
    api: ApiClient,
    artifact: Artifact,
    path: Path,
    progress: Progress | None = None,
    retry: RetryPolicy = TRANSFER_RETRY,
    *,
    job: str | None = None,
) -> None:
    """Download an artifact to ``path``, unless it is there already.

    Until it is complete it is in ``<path>.part``, where another call continues. ``job``: it is one of
    the checkpoints of that job. Raises ``ServerError`` if the bytes do not have the artifact's digest.
    """
    report = progress or _no_progress
    if path.is_file() and path.stat().st_size == artifact.size and sha256_of(path) == artifact.sha256:
        report(artifact.size, artifact.size)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    found = part.stat().st_size if part.exists() else 0
    route = f"/api/artifacts/{artifact.sha256}" + ("" if job is None else f"?job={quote(job, safe='')}")
    _fetch(api, route, artifact, part, report, retry)
    if found and sha256_of(part) != artifact.sha256:  # perhaps the beginning of another file
        part.unlink()
        _fetch(api, route, artifact, part, report, retry)
    if sha256_of(part) != artifact.sha256:
        part.unlink()
        raise ServerError(
            f"{api.url} sent other bytes than those of the artifact {artifact.sha256[:12]}: the "
            "server's folder is damaged, or something changes the bytes in transit"
        )
    part.replace(path)


def _fetch(
    api: ApiClient,
    route: str,
    artifact: Artifact,
    part: Path,
    report: Progress,
    retry: RetryPolicy,
) -> None:
    pauses = _Pauses(retry)
    part.touch()
    while (done := part.stat().st_size) < artifact.size:
        try:
            _fetch_once(api, route, artifact, part, done, report)
        except ServerError as error:
            if not is_temporary(error):
                raise
            if part.stat().st_size > done:
                pauses.restart()
            pauses.wait(error)


def _fetch_once(
    api: ApiClient, route: str, artifact: Artifact, part: Path, done: int, report: Progress
) -> None:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with api.stream(route, headers=headers) as answer:
        resumes = done > 0 and answer.status_code == 206
        done = done if resumes else 0
        with part.open("ab" if resumes else "wb") as file:
            for chunk in answer.iter_bytes():
                done += len(chunk)
                if done > artifact.size:
                    file.truncate(0)
                    raise ServerError(
                        f"{api.url} sends more than the {artifact.size} bytes of the artifact "
                        f"{artifact.sha256[:12]}"
                    )
                file.write(chunk)
                report(done, artifact.size)


class _Pauses:
    """Pauses of one transfer; they restart whenever some bytes were transferred."""

    def __init__(self, retry: RetryPolicy) -> None:
        self._retry = retry
        self._left = retry.pauses()

    def restart(self) -> None:
        """Allow as many pauses as at the start."""
        self._left = self._retry.pauses()

    def wait(self, error: ServerError) -> None:
        """Pause, or raise ``error`` if no pause is left."""
        pause = next(self._left, None)
        if pause is None:
            raise error
        self._retry.sleep(pause_after(error, pause))


def _report_total(report: Progress, before: int, total: int, done: int) -> None:
    report(before + done, total)


def _no_progress(_done: int, _total: int) -> None:
    """Ignore progress."""


def artifact_of(path: Path) -> Artifact:
    """Return the digest and size of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Artifact(sha256=digest, size=path.stat().st_size)
