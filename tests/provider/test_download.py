"""What a provider takes from a server, and what it does not."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path
from typing import Any

import pytest
from assigning_server import FakeServer, small_job
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from ravnest.errors import ServerError, ServerRefusedError, StageFormatError
from ravnest.provider.download import Fetching, write_certificate
from ravnest.provider.job_dir import CERTIFICATES, JobDir, JobsDir
from ravnest.schemas.providers import Assignment, SignedCertificate
from ravnest.store.bundle import load_stage
from ravnest.store.node_spec import read_node
from ravnest.transport.certificates import Authority, signing_request

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def assignment(server: FakeServer, tmp_path: Path) -> Assignment:
    return small_job(server, tmp_path / "job", nodes=1)[0]


@pytest.fixture
def place(tmp_path: Path) -> JobDir:
    return JobsDir(tmp_path / "provider").place("job-0")


def fetch(server: FakeServer, place: JobDir, address: str) -> Any:
    return Fetching(server.api(), address).fetch("job-0", place, lambda: None)


def changed(server: FakeServer, assignment: Assignment, **node: Any) -> str:
    """Another file for the node; the provider's address."""
    data = assignment.node_file | node
    server.assignments["job-0"] = assignment.model_copy(update={"node_file": data})
    return str(assignment.node_file["address"])


def test_a_workplace_has_all_that_the_worker_needs(
    server: FakeServer, assignment: Assignment, place: JobDir
) -> None:
    fetched, node = fetch(server, place, assignment.node_file["address"])
    assert fetched == assignment == place.read_assignment()
    assert read_node(place.node_data, "node_0") == node
    assert load_stage(place.node_data / node.bundle, node.sha256).spec.index == 0
    pieces = {*assignment.train.inputs, *assignment.train.labels}
    assert all(place.piece(piece.artifact).is_file() for piece in pieces)


def test_a_second_fetch_takes_what_is_there(
    server: FakeServer, assignment: Assignment, place: JobDir
) -> None:
    fetch(server, place, assignment.node_file["address"])
    server.artifacts.clear()
    fetch(server, place, assignment.node_file["address"])


@pytest.mark.parametrize(
    "node",
    [
        {"bundle": "../../outside"},
        {"bundle": "/etc"},
        {"certificates": {"authority": "../a", "certificate": "b", "key": "c"}},
        {"certificates": {"authority": "a", "certificate": "b", "key": "/root/key"}},
        {"format": "something else"},
        {"node": 7},
        {"role": "Boss"},
        {"surprise": 1},
    ],
)
def test_node_files_that_lead_elsewhere_or_are_none_are_refused(
    server: FakeServer, assignment: Assignment, place: JobDir, node: dict[str, Any], tmp_path: Path
) -> None:
    before = set(tmp_path.rglob("*"))
    with pytest.raises(StageFormatError):
        fetch(server, place, changed(server, assignment, **node))
    assert {p for p in set(tmp_path.rglob("*")) - before if place.folder.parent not in p.parents} <= {
        place.folder.parent
    }


def test_names_of_files_are_ours(server: FakeServer, assignment: Assignment, place: JobDir) -> None:
    address = changed(server, assignment, bundle="nodes")
    _, node = fetch(server, place, address)
    assert node.bundle == "stage"


def test_a_node_at_another_address_is_not_ours(
    server: FakeServer, assignment: Assignment, place: JobDir
) -> None:
    address = changed(server, assignment, address="0.0.0.0:22")
    with pytest.raises(StageFormatError, match=r"planned for 0\.0\.0\.0:22"):
        fetch(server, place, address)


def test_another_assignment_than_the_one_asked_for(
    server: FakeServer, assignment: Assignment, place: JobDir
) -> None:
    server.assignments["job-0"] = assignment.model_copy(update={"id": "other"})
    with pytest.raises(ServerError, match="instead of job-0"):
        fetch(server, place, assignment.node_file["address"])


def test_files_that_do_not_fit_on_the_disk(
    server: FakeServer, assignment: Assignment, place: JobDir
) -> None:
    huge = assignment.stage.model_copy(update={"size": 1 << 60})
    server.assignments["job-0"] = assignment.model_copy(update={"stage": huge})
    with pytest.raises(StageFormatError, match="make room"):
        fetch(server, place, assignment.node_file["address"])


def test_a_stop_ends_a_fetch(server: FakeServer, assignment: Assignment, place: JobDir) -> None:
    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Fetching(server.api(), assignment.node_file["address"]).fetch("job-0", place, check)
    assert not (place.folder / "assignment.json").exists()


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/etc", ".hidden", "a\0b", "x" * 200, "a\n"])
def test_assignments_have_names_that_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(StageFormatError):
        JobsDir(tmp_path).place(name)


# Certificates


def signer(csr: str) -> dict[str, str]:
    """Signs what it gets, as a server does: by its own words, only the key is taken."""
    authority = Authority("test", NOW)
    request = x509.load_pem_x509_csr(csr.encode())
    assert request.is_signature_valid
    certificate = authority.sign(csr.encode(), "node_0", ["127.0.0.1"])
    return {"certificate": certificate.decode(), "authority": authority.certificate.decode()}


def test_the_key_stays_here_and_only_its_owner_can_read_it(
    server: FakeServer, assignment: Assignment, place: JobDir
) -> None:
    server.assignments["job-0"] = assignment.model_copy(update={"tls": True})
    server.signs = signer
    fetch(server, place, assignment.node_file["address"])
    key = place.node_data / CERTIFICATES.key
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    own = serialization.load_pem_private_key(key.read_bytes(), None)
    certificate = (place.node_data / CERTIFICATES.certificate).read_bytes()
    assert x509.load_pem_x509_certificate(certificate).public_key() == own.public_key()


def test_a_certificate_of_another_key_or_authority_is_refused(tmp_path: Path) -> None:
    _, key = signing_request("node_0")
    authority, other = Authority("one", NOW), Authority("two", NOW)
    identity = authority.issue("node_0", ["127.0.0.1"])
    signed = SignedCertificate(
        certificate=identity.certificate.decode(), authority=authority.certificate.decode()
    )
    with pytest.raises(ServerError, match="another key"):
        write_certificate(tmp_path, key, signed)
    with pytest.raises(ServerError, match="not a certificate of its authority"):
        write_certificate(
            tmp_path, key, signed.model_copy(update={"authority": other.certificate.decode()})
        )
    with pytest.raises(ServerError, match="not a certificate of its authority"):
        write_certificate(tmp_path, key, SignedCertificate(certificate="x", authority="y"))
    assert not list(tmp_path.iterdir())


def test_a_refusal_to_sign_is_passed_on(
    server: FakeServer, assignment: Assignment, place: JobDir
) -> None:
    server.assignments["job-0"] = assignment.model_copy(update={"tls": True})
    with pytest.raises(ServerRefusedError):
        fetch(server, place, assignment.node_file["address"])
    assert not (place.folder / "assignment.json").exists()
