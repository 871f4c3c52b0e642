"""Makes the folder of a worker from what the server has for it.

All that comes is checked: digests, sizes, and that it is for this provider. Paths are ours: nothing
that the server says becomes the name of a file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from ravnest.errors import ServerError, StageFormatError
from ravnest.http.api import ApiClient
from ravnest.http.transfer import download
from ravnest.provider.job_dir import BUNDLE, CERTIFICATES, JobDir
from ravnest.schemas.base import Artifact
from ravnest.schemas.providers import Assignment, CertificateRequest, DataShare, SignedCertificate
from ravnest.store.files import write_json
from ravnest.store.node_spec import NodeSpec, node_path, read_node, write_node
from ravnest.transport.certificates import signing_request

_SPARE = 1 << 30
"""Bytes of the disk that stay free."""

Check = Callable[[], None]
"""Called now and then; raises to end what is under way."""


@dataclass(frozen=True)
class Fetching:
    """What this provider expects of its assignments."""

    api: ApiClient
    address: str
    """Where others reach its node."""

    def fetch(self, name: str, place: JobDir, check: Check) -> tuple[Assignment, NodeSpec]:
        """Make a workplace; calling again goes on where an earlier call broke off."""
        assignment = self.api.get(f"/api/assignments/{name}", Assignment)
        if assignment.id != name:
            raise ServerError(f"the server sent the assignment {assignment.id[:100]} instead of {name}")
        node = write_place(place, assignment, self.address)
        files = files_of(place, assignment)
        _check_disk(place.folder, files)
        for path, artifact in files.items():
            check()
            download(self.api, artifact, path, lambda _done, _total: check())
        if assignment.tls:
            self._certify(name, place, node)
        place.write_assignment(assignment)
        return assignment, node

    def _certify(self, name: str, place: JobDir, node: NodeSpec) -> None:
        request, key = signing_request(node.name)
        signed = self.api.post(
            f"/api/assignments/{name}/certificate",
            CertificateRequest(csr=request.decode()),
            SignedCertificate,
            idempotent=True,
        )
        write_certificate(place.node_data, key, signed)


def write_place(place: JobDir, assignment: Assignment, address: str) -> NodeSpec:
    """Write the node's file, if it is one and this provider's."""
    _write_raw(place, assignment.node, assignment.node_file)
    node = read_node(place.node_data, f"node_{assignment.node}")
    if node.address != address:
        raise StageFormatError(
            f"{node.name} is planned for {str(node.address)[:100]}; this provider is at {address}"
        )
    if node.sha256 != assignment.stage.sha256:
        raise StageFormatError(f"{node.name} is planned with another stage than the one to fetch")
    node = replace(node, bundle=BUNDLE, certificates=CERTIFICATES)
    write_node(place.node_data, node)
    return node


def _write_raw(place: JobDir, node: int, data: Mapping[str, Any]) -> None:
    write_json(node_path(place.node_data, node), data)


def files_of(place: JobDir, assignment: Assignment) -> dict[Path, Artifact]:
    """Where each file of an assignment goes."""
    graph, weights = place.stage
    files = {graph: assignment.stage, weights: assignment.weights}
    if assignment.loss is not None:
        graph, weights = place.loss
        files |= {graph: assignment.loss.stage, weights: assignment.loss.weights}
    for share in (assignment.train, assignment.validation):
        files |= {place.piece(artifact): artifact for artifact in _pieces(share)}
    return files


def _pieces(share: DataShare | None) -> list[Artifact]:
    return [] if share is None else [piece.artifact for piece in (*share.inputs, *share.labels)]


def _check_disk(folder: Path, files: Mapping[Path, Artifact]) -> None:
    needed = sum(artifact.size for path, artifact in files.items() if not path.exists())
    free = shutil.disk_usage(folder).free
    if needed + _SPARE > free:
        raise StageFormatError(
            f"its files have {needed / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB left, of which "
            f"{_SPARE / 1e9:.1f} stay free; make room, or give another --folder"
        )


def write_certificate(node_data: Path, key: bytes, signed: SignedCertificate) -> None:
    """Put a certificate where the node finds it, with its key (PEM), which only its owner can read."""
    try:
        certificate = x509.load_pem_x509_certificate(signed.certificate.encode())
        authority = x509.load_pem_x509_certificate(signed.authority.encode())
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ServerError(
            f"what the server signed is not a certificate of its authority: {error}"
        ) from error
    own = serialization.load_pem_private_key(key, password=None)
    if certificate.public_key() != own.public_key():
        raise ServerError("the server signed the certificate of another key")
    path = node_data / CERTIFICATES.key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(key)
    (node_data / CERTIFICATES.certificate).write_text(signed.certificate, encoding="ascii")
    (node_data / CERTIFICATES.authority).write_text(signed.authority, encoding="ascii")
