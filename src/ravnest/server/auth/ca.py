"""The server's own certificate authority, and one for each job."""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from ravnest.errors import ServerError, ServerRefusedError
from ravnest.schemas.providers import SignedCertificate
from ravnest.server.folder import ServerFolder, write_private
from ravnest.transport.certificates import Authority, Identity

_LIFETIME = datetime.timedelta(days=3650)
"""Of the server's own authority: members know it by its fingerprint."""
_NODE_NAME = re.compile(r"node_\d+", re.IGNORECASE)


class CertificateAuthorities:
    """Makes them when they are first needed, and keeps them in the server's folder."""

    def __init__(self, folder: ServerFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def own(self, now: datetime.datetime) -> Authority:
        """The server's authority; ``ServerError`` if what is in the folder cannot be used."""
        return self._kept(self._folder.authority / "authority", "Ravnest server", now, _LIFETIME)

    def sign(
        self, job: str, node: int, hosts: Iterable[str], request: str, now: datetime.datetime
    ) -> SignedCertificate:
        """A certificate for a node of a job; ``ServerRefusedError`` if the request is not in order.

        A provider says at which host it is. One that calls its host ``node_0`` must not get a
        certificate with which it can pass for that node.
        """
        lifetime = datetime.timedelta(days=365)
        authority = self._kept(self._folder.job_authorities / job, f"Ravnest {job}", now, lifetime)
        honest = [host for host in hosts if not _NODE_NAME.fullmatch(host)]
        try:
            signed = authority.sign(request.encode(), f"node_{node}", honest)
        except ValueError as error:
            raise ServerRefusedError(f"the signing request cannot be signed: {error}", 422) from error
        return SignedCertificate(certificate=signed.decode(), authority=authority.certificate.decode())

    def forget(self, job: str) -> None:
        """Nobody gets a certificate for this job any more."""
        for path in _files(self._folder.job_authorities / job):
            path.unlink(missing_ok=True)

    def _kept(
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
                        f"the authority in {path.parent} cannot be used: {error}; move it away, and "
                        "everybody joins anew"
                    ) from error
            authority = Authority(name, now, lifetime=lifetime)
            write_private(key, authority.identity.key)
            write_private(certificate, authority.certificate)
            return authority


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.pem"), path.with_name(f"{path.name}.key")
