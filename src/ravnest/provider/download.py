"""Downloads the files of an assignment into the folder of its worker.

Everything that comes from the server is checked: digests, sizes, and that it is meant for this provider.
No string of the server becomes a path.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from ravnest.errors import ServerError, StageFormatError
from ravnest.http.api import ApiClient
from ravnest.http.transfer import download
from ravnest.provider.job_dir import BUNDLE, CERTIFICATES, JobDir, JobsDir
from ravnest.schemas.base import Artifact
from ravnest.schemas.providers import Assignment, CertificateRequest, DataShare, SignedCertificate
from ravnest.store.checkpoint import SEED, CheckpointFolder
from ravnest.store.node_spec import NodeSpec, write_node
from ravnest.transport.certificates import signing_request

SPARE = 1 << 30
"""Bytes of the disk that stay free."""

Check = Callable[[], None]
"""Called now and then; raises to end the download."""


@dataclass(frozen=True)
class AssignmentDownload:
    """Download of assignments by one provider."""

    api: ApiClient
    addresses: tuple[str, ...]
    """Addresses of this provider's node."""

    def run(self, name: str, job_dir: JobDir, check: Check) -> tuple[Assignment, NodeSpec]:
        """Fill the folder of an assignment; a second call continues where an earlier one stopped."""
        assignment = self.api.get(f"/api/assignments/{name}", Assignment)
        if assignment.id != name:
            raise ServerError(f"the server sent the assignment {assignment.id[:100]} instead of {name}")
        node = own_node_spec(assignment, self.addresses)
        if assignment.continues is not None:
            JobsDir(job_dir.folder.parent).adopt(assignment.continues, name)
            job_dir.forget_outcome()  # if it had finished: this assignment repeats the end
        write_node(job_dir.node_data, node)
        files = files_of(job_dir, assignment)
        _check_disk(job_dir.folder, files)
        for path, artifact in files.items():
            check()
            download(self.api, artifact, path, lambda _done, _total: check())
        if assignment.tls:
            self._certify(name, job_dir, node)
        job_dir.write_assignment(assignment)
        return assignment, node

    def _certify(self, name: str, job_dir: JobDir, node: NodeSpec) -> None:
        request, key = signing_request(node.name)
        signed = self.api.post(
            f"/api/assignments/{name}/certificate",
            CertificateRequest(csr=request.decode()),
            SignedCertificate,
            idempotent=True,
        )
        write_certificate(job_dir.node_data, key, signed)


def own_node_spec(assignment: Assignment, addresses: Collection[str]) -> NodeSpec:
    """Return the node spec of an assignment with paths of ours, if it is meant for this provider."""
    node = assignment.node_spec
    if node.node != assignment.node:
        raise StageFormatError(f"the assignment of node_{assignment.node} describes {node.name}")
    if node.address not in addresses:
        raise StageFormatError(
            f"{node.name} is planned for {node.address[:100]}; this provider is at "
            f"{', '.join(addresses)}"
        )
    if node.sha256 != assignment.stage.sha256:
        raise StageFormatError(f"{node.name} is planned with another stage than the one to fetch")
    return replace(node, bundle=BUNDLE, certificates=CERTIFICATES)


def files_of(job_dir: JobDir, assignment: Assignment) -> dict[Path, Artifact]:
    """Return the files of an assignment by the path where each belongs."""
    graph, weights = job_dir.stage
    files = {graph: assignment.stage, weights: assignment.weights}
    if assignment.loss is not None:
        graph, weights = job_dir.loss
        files |= {graph: assignment.loss.stage, weights: assignment.loss.weights}
    for number, metric in assignment.graph_metrics.items():
        graph, weights = job_dir.metric(number)
        files |= {graph: metric.stage, weights: metric.weights}
    if (augmentation := assignment.training.augmentation) is not None:
        graph, weights = job_dir.augmentation
        files |= {graph: augmentation.graph.stage, weights: augmentation.graph.weights}
    if (seed := assignment.seed) is not None:
        seeds = CheckpointFolder(job_dir.node_data / BUNDLE / SEED)
        files[seeds.tensors_path(seed.id)] = seed.tensors
        files[seeds.manifest_path(seed.id)] = seed.manifest  # last: it makes the checkpoint exist
    for share in (assignment.train, assignment.validation):
        files |= {} if share is None else _data_files(job_dir, share)
    return files


def _data_files(job_dir: JobDir, share: DataShare) -> dict[Path, Artifact]:
    rest = share.remainder
    ranges = (*share.inputs, *share.labels, *(() if rest is None else (*rest.inputs, *rest.labels)))
    files = {job_dir.data_file(each.artifact): each.artifact for each in ranges}
    return files if rest is None else files | {job_dir.rows_file(rest.rows): rest.rows}


def _check_disk(folder: Path, files: Mapping[Path, Artifact]) -> None:
    needed = sum(artifact.size for path, artifact in files.items() if not path.exists())
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise StageFormatError(
            f"its files need {needed / 1e9:.2f} GB; {folder} has {free / 1e9:.2f} GB free, and "
            f"{SPARE / 1e9:.1f} GB of these are not used; free some space, or give another --folder"
        )


def write_certificate(node_data: Path, key: bytes, signed: SignedCertificate) -> None:
    """Write a node's certificate and its key (PEM); only the owner can read the key."""
    check_certificate(key, signed)
    path = node_data / CERTIFICATES.key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(key)
    (node_data / CERTIFICATES.certificate).write_text(signed.certificate, encoding="ascii")
    (node_data / CERTIFICATES.authority).write_text(signed.authority, encoding="ascii")


def check_certificate(key: bytes, signed: SignedCertificate) -> None:
    """Raise ``ServerError`` unless the server has signed a certificate of this key (PEM)."""
    try:
        certificate = x509.load_pem_x509_certificate(signed.certificate.encode())
        authority = x509.load_pem_x509_certificate(signed.authority.encode())
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ServerError(
            f"the server's answer is not a certificate signed by its authority: {error}"
        ) from error
    own = serialization.load_pem_private_key(key, password=None)
    if certificate.public_key() != own.public_key():
        raise ServerError("the server signed the certificate of another key")
