"""Files by digest, to and from the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from ravnest.errors import ServerRefusedError
from ravnest.schemas.base import Artifact, Schema
from ravnest.schemas.jobs import MissingArtifacts
from ravnest.server.auth.dependencies import AWorker, ServerHere
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server

router = APIRouter(prefix="/api/artifacts", tags=["artifacts"])

_BLOCK = 1 << 20
"""Bytes that go to the disk at once."""

DigestInPath = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


class _Download(FileResponse):
    """A file in pieces of a size that is worth a trip to a thread each."""

    chunk_size = 1 << 20


class UploadStatus(Schema):
    """How much of an artifact the server has of this member."""

    received: int


@router.post("/missing")
def missing(body: MissingArtifacts, member: AWorker, server: ServerHere) -> MissingArtifacts:
    """Those of the artifacts that this member has not uploaded yet.

    That another has uploaded the same file does not count: who knows a digest might not have the file.
    """
    with server.store.look() as books:
        absent = set(books.holdings.missing(member.id, body.digests))
    lacking = (sha for sha in body.digests if sha in absent or not server.artifacts.has(sha))
    return MissingArtifacts(digests=tuple(dict.fromkeys(lacking)))


@router.get("/{sha}/upload")
def received(sha: DigestInPath, member: AWorker, server: ServerHere) -> UploadStatus:
    """Where an upload goes on."""
    path = server.artifacts.path(sha)
    with server.store.look() as books:
        is_whole = books.holdings.has([member.id], sha) and path.is_file()
    size = path.stat().st_size if is_whole else server.artifacts.received(sha, member.id)
    return UploadStatus(received=size)


@router.put("/{sha}/upload")
async def upload(
    sha: DigestInPath,
    request: Request,
    member: AWorker,
    server: ServerHere,
    offset: Annotated[int, Query(ge=0)],
    size: Annotated[int | None, Query(ge=0)] = None,
) -> UploadStatus:
    """Add the bytes of the body; with the last one the digest is checked and the artifact exists."""
    with await run_in_threadpool(server.artifacts.upload, sha, size, offset, member.id) as target:
        try:
            async for block in _blocks(request):
                await run_in_threadpool(target.write, block)
        except ClientDisconnect:
            raise ServerRefusedError("the upload broke off; what came is kept", 400) from None
        if await run_in_threadpool(target.finish):
            artifact = Artifact(sha256=sha, size=target.received)
            await run_in_threadpool(_give, server, member, artifact)
        return UploadStatus(received=target.received)


@router.get("/{sha}")
def download(sha: DigestInPath, member: AWorker, server: ServerHere) -> FileResponse:
    """The file, or a range of it: of one's own, of one's part in a job, of one's job's result."""
    with server.store.look() as books:
        part = books.parts.live_of(member.id)
        owners = [member.id] + ([part.id] if part is not None else [])
        may = books.holdings.has(owners, sha)
    if not may:
        raise server.trust.refused(
            member.id, f"{member.name} wanted the file {sha}, which is not its own"
        )
    path = server.artifacts.path(sha)
    if not path.is_file():
        raise ServerRefusedError(f"the file {sha} is no longer here; upload it again", 404)
    return _Download(path, media_type="application/octet-stream")


def _give(server: Server, member: MemberRecord, artifact: Artifact) -> None:
    with server.store.change(server.clock.wall()) as books:
        books.holdings.give(member.id, [artifact])


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    """The body in larger pieces than it comes in: each is a trip to a thread."""
    gathered = bytearray()
    async for chunk in request.stream():
        gathered += chunk
        if len(gathered) >= _BLOCK:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
