"""Certificate authorities: one for the server, and one for each job."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

from ravnest.errors import ServerError, ServerRefusedError
from ravnest.schemas.providers import SignedCertificate
from ravnest.server.folder import ServerFolder, write_private
from ravnest.transport.certificates import Authority, Identity, certificate_name

_LIFETIME = datetime.timedelta(days=3650)
"""Lifetime of the server's authority: members identify it by its fingerprint."""


class CertificateAuthorities:
    """Creates authorities on first use and keeps them in the server's folder."""

    def __init__(self, folder: ServerFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def own(self, now: datetime.datetime) -> Authority:
        """Return the server's authority; raise ``ServerError`` if the stored one cannot be used."""
        return self._load_or_create(
            self._folder.authority / "authority", "Ravnest server", now, _LIFETIME
        )

    def sign(
        self, job: str, node: int, generation: int, request: str, now: datetime.datetime
    ) -> SignedCertificate:
        """Sign a certificate for a node of a job; refuse (422) an invalid request.

        It is valid for this generation of the node only: nothing that a provider chose gets into it.
        """
        lifetime = datetime.timedelta(days=365)
        authority = self._load_or_create(
            self._folder.job_authorities / job, f"Ravnest {job}", now, lifetime
        )
        try:
            signed = authority.sign(request.encode(), certificate_name(node, generation))
        except ValueError as error:
            raise ServerRefusedError(f"the signing request cannot be signed: {error}", 422) from error
        return SignedCertificate(certificate=signed.decode(), authority=authority.certificate.decode())

    def forget(self, job: str) -> None:
        """Delete the authority of a job, so that no more certificates are signed for it."""
        for path in _files(self._folder.job_authorities / job):
            path.unlink(missing_ok=True)

    def _load_or_create(
        self, path: Path, name: str, now: datetime.datetime, lifetime: datetime.timedelta
    ) -> Authority:
        certificate, key = _files(path)
        with self._lock:
            if certificate.exists() and key.exists():
                saved = Identity(certificate.read_bytes(), key.read_bytes())
                try:
                    return Authority(name, now, saved=saved)
                except ValueError as error:
                    raise ServerError(
                        f"the authority in {path.parent} cannot be used: {error}; move it away and let "
                        "all members join again"
                    ) from error
            authority = Authority(name, now, lifetime=lifetime)
            write_private(key, authority.identity.key)
            write_private(certificate, authority.certificate)
            return authority


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.pem"), path.with_name(f"{path.name}.key")
