"""Routes of assignments: a provider gets its own, and a certificate for its node."""

from __future__ import annotations

from fastapi import APIRouter

from ravnest.errors import ServerRefusedError
from ravnest.schemas.providers import Assignment, CertificateRequest, PeerAddresses, SignedCertificate
from ravnest.server.auth.dependencies import CurrentServer, ProviderMember
from ravnest.server.db.records import MemberRecord
from ravnest.server.http.guarded_route import GuardedRoute
from ravnest.server.scheduling.successor import peers
from ravnest.server.server import Server

router = APIRouter(prefix="/api/assignments", tags=["assignments"], route_class=GuardedRoute)


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
    return server.auth.sign(found.job, found.node, body.csr, found.node_spec.generation)


@router.get("/{assignment}/peers")
def get_peers(assignment: str, member: ProviderMember, server: CurrentServer) -> PeerAddresses:
    """Return where the node's peers are now: other machines may have taken their places."""
    own = _own(server, member, assignment)
    named = peers(own.node_spec)
    with server.db.read() as db:
        records = [each for each in db.assignments.of_job(own.job) if each.node in named]
        specs = [db.assignments.body(each.id).node_spec for each in records if not each.has_ended]
    found = (address for spec in specs for address in (spec.address, *spec.others))
    return PeerAddresses(addresses=tuple(dict.fromkeys(found)))


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
