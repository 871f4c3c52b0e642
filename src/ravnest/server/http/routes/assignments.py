"""Routes of assignments: a provider gets its own, and a certificate for its node."""

from __future__ import annotations

from fastapi import APIRouter

from ravnest.errors import ServerRefusedError
from ravnest.schemas.providers import Assignment, CertificateRequest, SignedCertificate
from ravnest.server.auth.dependencies import CurrentServer, ProviderMember
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server

router = APIRouter(prefix="/api/assignments", tags=["assignments"])


@router.get("/{assignment}")
def get(assignment: str, member: ProviderMember, server: CurrentServer) -> Assignment:
    """Return everything that the worker needs, by digest."""
    return _own(server, member, assignment)


@router.post("/{assignment}/certificate")
def certificate(
    assignment: str, body: CertificateRequest, member: ProviderMember, server: CurrentServer
) -> SignedCertificate:
    """Sign a certificate for the node; the plan determines its name."""
    found = _own(server, member, assignment)
    return server.auth.sign(found.job, found.node, body.csr)


def _own(server: Server, member: MemberRecord, assignment: str) -> Assignment:
    """Return an assignment that has not ended and is the provider's own."""
    with server.db.read() as db:
        record = db.assignments.get(assignment)
        if record is not None and record.provider == member.id and not record.has_ended:
            return db.assignments.body(assignment)
    if record is None:
        raise ServerRefusedError(f"there is no assignment {assignment}", 404)
    if record.provider != member.id:
        what = f"{member.name} requested {assignment}, an assignment of another provider"
        raise server.auth.refused(member.id, what)
    raise ServerRefusedError(f"this assignment has ended: it is {record.phase}", 409)
