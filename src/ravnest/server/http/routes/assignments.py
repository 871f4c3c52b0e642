"""Assignments: a provider gets its own, and a certificate for its node."""

from __future__ import annotations

from fastapi import APIRouter

from ravnest.errors import ServerRefusedError
from ravnest.schemas.providers import Assignment, CertificateRequest, SignedCertificate
from ravnest.server.auth.dependencies import AProvider, ServerHere
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server
from ravnest.types import Address

router = APIRouter(prefix="/api/assignments", tags=["assignments"])


@router.get("/{assignment}")
def get(assignment: str, member: AProvider, server: ServerHere) -> Assignment:
    """Everything that the worker needs, by digest."""
    return _own(server, member, assignment)


@router.post("/{assignment}/certificate")
def certificate(
    assignment: str, body: CertificateRequest, member: AProvider, server: ServerHere
) -> SignedCertificate:
    """A certificate for the node; its name and addresses are those of the plan."""
    found = _own(server, member, assignment)
    hosts = [Address.parse(str(found.node_file["address"])).host]
    return server.trust.sign(found.job, found.node, hosts, body.csr)


def _own(server: Server, member: MemberRecord, assignment: str) -> Assignment:
    """The assignment, if it is the provider's own and it should be working at it."""
    with server.store.look() as books:
        part = books.parts.get(assignment)
        if part is not None and part.provider == member.id and not part.has_ended:
            return books.parts.body(assignment)
    if part is None:
        raise ServerRefusedError(f"there is no assignment {assignment}", 404)
    if part.provider != member.id:
        raise server.trust.refused(member.id, f"{member.name} asked for another's part: {assignment}")
    raise ServerRefusedError(f"this part is over: it is {part.phase}", 409)
