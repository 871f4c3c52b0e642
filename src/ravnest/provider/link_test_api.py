"""Requests to the server about one link test."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ravnest.errors import ServerError
from ravnest.http.api import ApiClient
from ravnest.provider.download import check_certificate
from ravnest.schemas.link_tests import LinkTestResult
from ravnest.schemas.providers import CertificateRequest, SignedCertificate
from ravnest.transport.certificates import signing_request
from ravnest.transport.tls import Credentials

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkTestApi:
    """Certificate and result of a link test."""

    api: ApiClient
    test: str

    def credentials(self, node_name: str) -> Credentials:
        """Return credentials that are valid for this test only; ``ServerError`` if it is over."""
        request, key = signing_request(node_name)
        signed = self.api.post(
            f"/api/links/tests/{self.test}/certificate",
            CertificateRequest(csr=request.decode()),
            SignedCertificate,
            idempotent=True,
        )
        check_certificate(key, signed)
        return Credentials(signed.authority.encode(), signed.certificate.encode(), key)

    def report(self, result: LinkTestResult) -> None:
        """Send the result; the server gives a test up whose result does not arrive."""
        try:
            self.api.post(f"/api/links/tests/{self.test}/result", result, object, idempotent=True)
        except ServerError as error:
            logger.info("the result of the link test %s was not reported: %s", self.test, error)
