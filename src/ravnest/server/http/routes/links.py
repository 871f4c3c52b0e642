"""Routes of links between providers: their tests, and the measured figures."""

from __future__ import annotations

from fastapi import APIRouter

from ravnest.schemas.link_tests import LinkTestResult, LinkView
from ravnest.schemas.providers import CertificateRequest, SignedCertificate
from ravnest.server.auth.dependencies import AnyMember, CurrentServer, ProviderMember
from ravnest.server.http.guarded_route import GuardedRoute
from ravnest.server.views import link_views

router = APIRouter(prefix="/api/links", tags=["links"], route_class=GuardedRoute)


@router.get("")
def listed(member: AnyMember, server: CurrentServer) -> list[LinkView]:
    """Return the newest figures of all measured links that the member may see."""
    with server.db.read() as db:
        return link_views(db, member)


@router.post("/tests/{test}/certificate")
def certificate(
    test: str, body: CertificateRequest, member: ProviderMember, server: CurrentServer
) -> SignedCertificate:
    """Sign a certificate for a test; it is valid for this test only."""
    return server.link_test_service.sign(member, test, body.csr)


@router.post("/tests/{test}/result")
def result(test: str, body: LinkTestResult, member: ProviderMember, server: CurrentServer) -> None:
    """Report the figures of a test, or why it failed."""
    server.link_test_service.report(member, test, body)
