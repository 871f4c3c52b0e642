"""Files to and from a server, by digest: whatever breaks, they go on where they stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from ravnest.errors import ServerError, ServerRefusedError
from ravnest.http.api import ApiClient, may_pass
from ravnest.http.retry import RetryPolicy
from ravnest.schemas.base import Artifact, Schema
from ravnest.schemas.jobs import MissingArtifacts
from ravnest.store.files import sha256_of

Progress = Callable[[int, int], None]
"""Bytes that are done, and bytes in all."""

_PART = 32 << 20
"""Bytes of a request: a server or a proxy may refuse longer ones."""
_CHUNK = 1 << 20
TRANSFER = RetryPolicy(tries=10)
"""A server may take seconds to see that a connection broke, and takes no bytes before."""
_ASKED = 1000
"""Digests of a question for those that are missing."""


class Received(Schema):
    """How much of an artifact the server has."""

    received: int


def upload(
    api: ApiClient,
    files: Mapping[str, Path],
    progress: Progress | None = None,
    patience: RetryPolicy = TRANSFER,
) -> None:
    """Send those of ``files`` (by sha256) that the server does not have.

    ``ServerUnreachableError`` once nothing more gets through; calling again goes on from there.
    """
    missing = {digest: files[digest] for digest in missing_of(api, files)}
    total = sum(path.stat().st_size for path in missing.values())
    before = 0
    tell = progress or _nobody
    tell(0, total)
    for digest, path in missing.items():
        one = _Upload(api, digest, path, patience)
        one.run(partial(_tell_of_all, tell, before, total))
        before += one.size


def missing_of(api: ApiClient, digests: Mapping[str, object]) -> list[str]:
    """Which artifacts the server lacks, each once and in the order given."""
    names = list(digests)
    lacking: list[str] = []
    for start in range(0, len(names), _ASKED):
        asked = MissingArtifacts(digests=tuple(names[start : start + _ASKED]))
        answer = api.post("/api/artifacts/missing", asked, MissingArtifacts, idempotent=True)
        lacking += [digest for digest in asked.digests if digest in set(answer.digests)]
    return lacking


class _Upload:
    """One file: parts in order, each from where the server says that it stopped."""

    def __init__(self, api: ApiClient, digest: str, path: Path, patience: RetryPolicy) -> None:
        self._api = api
        self._patience = patience
        self._where = f"/api/artifacts/{digest}/upload"
        self._path = path
        self.size = path.stat().st_size
        self._tell: Callable[[int], None]

    def run(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        pauses = _Pauses(self._patience)
        offset = self._received()
        while True:
            try:
                offset = self._send(offset)  # an empty part, where only the server's check is missing
            except ServerError as error:
                elsewhere = isinstance(error, ServerRefusedError) and error.status == 409
                if not elsewhere and not may_pass(error):
                    raise
                reached = self._received()
                if elsewhere and reached == self.size:
                    return
                if reached > offset:
                    pauses.begin_again()
                pauses.wait(error)
                offset = reached
            else:
                if offset == self.size:
                    return
                pauses.begin_again()

    def _received(self) -> int:
        """Bytes that the server has; all of them if it has the artifact."""
        return min(self.size, self._api.get(self._where, Received).received)

    def _send(self, offset: int) -> int:
        stop = min(self.size, offset + _PART)
        params = {"offset": offset, "size": self.size}
        self._api.put_bytes(self._where, self._read(offset, stop), stop - offset, params=params)
        self._tell(stop)
        return stop

    def _read(self, start: int, stop: int) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(start)
            while start < stop:
                chunk = file.read(min(_CHUNK, stop - start))
                if not chunk:
                    raise ServerError(f"{self._path} became shorter while it was sent")
                yield chunk
                start += len(chunk)
                self._tell(start)


def download(
    api: ApiClient,
    artifact: Artifact,
    path: Path,
    progress: Progress | None = None,
    patience: RetryPolicy = TRANSFER,
) -> None:
    """Fetch an artifact into ``path``; what is there of it already is not fetched again.

    Until it is whole it is in ``<path>.part``, where another call goes on. ``ServerError`` if what
    comes does not have the artifact's digest.
    """
    tell = progress or _nobody
    if path.is_file() and path.stat().st_size == artifact.size and sha256_of(path) == artifact.sha256:
        tell(artifact.size, artifact.size)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    found = part.stat().st_size if part.exists() else 0
    _fetch(api, artifact, part, tell, patience)
    if found and sha256_of(part) != artifact.sha256:  # perhaps it was another file's beginning
        part.unlink()
        _fetch(api, artifact, part, tell, patience)
    if sha256_of(part) != artifact.sha256:
        part.unlink()
        raise ServerError(
            f"{api.url} sent other bytes than those of the artifact {artifact.sha256[:12]}; its folder "
            "is damaged, or something changes files on the way"
        )
    part.replace(path)


def _fetch(
    api: ApiClient, artifact: Artifact, part: Path, tell: Progress, patience: RetryPolicy
) -> None:
    pauses = _Pauses(patience)
    part.touch()
    while (done := part.stat().st_size) < artifact.size:
        try:
            _fetch_once(api, artifact, part, done, tell)
        except ServerError as error:
            if not may_pass(error):
                raise
            if part.stat().st_size > done:
                pauses.begin_again()
            pauses.wait(error)


def _fetch_once(api: ApiClient, artifact: Artifact, part: Path, done: int, tell: Progress) -> None:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with api.stream(f"/api/artifacts/{artifact.sha256}", headers=headers) as answer:
        goes_on = done > 0 and answer.status_code == 206
        done = done if goes_on else 0
        with part.open("ab" if goes_on else "wb") as file:
            for chunk in answer.iter_bytes():
                done += len(chunk)
                if done > artifact.size:
                    file.truncate(0)
                    raise ServerError(
                        f"{api.url} sends more than the {artifact.size} bytes of the artifact "
                        f"{artifact.sha256[:12]}"
                    )
                file.write(chunk)
                tell(done, artifact.size)


class _Pauses:
    """Pauses of one transfer; they begin anew whenever something got through."""

    def __init__(self, patience: RetryPolicy) -> None:
        self._patience = patience
        self.begin_again()

    def begin_again(self) -> None:
        self._left = self._patience.pauses()

    def wait(self, error: ServerError) -> None:
        """Pause, or raise the error if there were enough of them."""
        pause = next(self._left, None)
        if pause is None:
            raise error
        self._patience.sleep(pause)


def _tell_of_all(tell: Progress, before: int, total: int, done: int) -> None:
    tell(before + done, total)


def _nobody(_done: int, _total: int) -> None:
    """Progress that nobody wants to know."""


def artifact_of(path: Path) -> Artifact:
    """The artifact that a file would be."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Artifact(sha256=digest, size=path.stat().st_size)
