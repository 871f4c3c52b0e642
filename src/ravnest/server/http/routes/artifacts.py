"""Routes of artifacts: upload and download of files by digest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from ravnest.errors import ServerRefusedError
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import MissingArtifacts, UploadStatus
from ravnest.server.auth.dependencies import ArtifactMember, CurrentServer
from ravnest.server.db.records import MemberRecord
from ravnest.server.http.guarded_route import GuardedRoute, Position, large_body, streamed_body
from ravnest.server.partial_service import partial_reader
from ravnest.server.server import Server

router = APIRouter(prefix="/api/artifacts", tags=["artifacts"], route_class=GuardedRoute)

_BLOCK = 1 << 20
"""Bytes that are written to the disk at once."""

DigestInPath = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


class _Download(FileResponse):
    """File response with chunks that are large enough for a thread switch each."""

    chunk_size = 1 << 20


@router.post("/missing")
@large_body
def missing(body: MissingArtifacts, member: ArtifactMember, server: CurrentServer) -> MissingArtifacts:
    """Return those of the artifacts that this member has not uploaded yet.

    Uploads of other members do not count: a member that knows a digest may not have the file.
    """
    with server.db.read() as db:
        absent = set(db.artifact_grants.missing(member.id, body.digests))
    lacking = (sha for sha in body.digests if sha in absent or not server.artifacts.has(sha))
    return MissingArtifacts(digests=tuple(dict.fromkeys(lacking)))


@router.get("/{sha}/upload")
def received(sha: DigestInPath, member: ArtifactMember, server: CurrentServer) -> UploadStatus:
    """Return the offset at which an upload continues."""
    path = server.artifacts.path(sha)
    with server.db.read() as db:
        is_complete = db.artifact_grants.has([member.id], sha) and path.is_file()
    size = path.stat().st_size if is_complete else server.artifacts.received(sha, member.id)
    return UploadStatus(received=size)


@router.put("/{sha}/upload")
@streamed_body
async def upload(
    sha: DigestInPath,
    request: Request,
    member: ArtifactMember,
    server: CurrentServer,
    offset: Position,
    size: Position,
) -> UploadStatus:
    """Append the body to an upload of ``size`` bytes; the digest is checked after the last one."""
    with await run_in_threadpool(server.artifacts.upload, sha, size, offset, member.id) as target:
        try:
            async for block in _blocks(request):
                await run_in_threadpool(target.write, block)
        except ClientDisconnect:
            raise ServerRefusedError(
                "the upload was interrupted; the received bytes are kept", 400
            ) from None
        if await run_in_threadpool(target.finish):
            artifact = Artifact(sha256=sha, size=target.received)
            await run_in_threadpool(_grant, server, member, artifact)
        return UploadStatus(received=target.received)


@router.get("/{sha}")
def download(
    sha: DigestInPath,
    member: ArtifactMember,
    server: CurrentServer,
    job: Annotated[str | None, Query(max_length=100)] = None,
) -> FileResponse:
    """Return a file, or a range of it, that the member uploaded or that was granted to it.

    ``job``: the file is one of those that ``/api/jobs/{job}/partial`` listed for the member.
    """
    with server.db.read() as db:
        assignment = db.assignments.current(member.id)
        owners = [member.id] + ([assignment.id] if assignment is not None else [])
        owners += [] if job is None else [partial_reader(job, member.id)]
        is_granted = db.artifact_grants.has(owners, sha)
    if not is_granted:
        raise server.auth.refused(member.id, f"{member.name} requested {sha}, a file of another member")
    path = server.artifacts.path(sha)
    if not path.is_file():
        raise ServerRefusedError(f"the server no longer has the file {sha}; upload it again", 404)
    return _Download(path, media_type="application/octet-stream")


def _grant(server: Server, member: MemberRecord, artifact: Artifact) -> None:
    with server.db.write(server.clock.wall()) as db:
        db.artifact_grants.grant(member.id, [artifact])


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in larger blocks than it arrives in: each block costs a thread switch."""
    gathered = bytearray()
    async for chunk in request.stream():
        gathered += chunk
        if len(gathered) >= _BLOCK:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
