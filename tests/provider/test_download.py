"""Download of an assignment: what a provider accepts from a server, and what it refuses."""

from __future__ import annotations

import datetime
import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from loopback_server import LoopbackServer, Wire, loopback_server, next_assignment, offer_of

from ravnest.errors import RavnestError, ServerError, ServerRefusedError, StageFormatError
from ravnest.http.api import ApiClient
from ravnest.provider.download import AssignmentDownload, write_certificate
from ravnest.provider.job_dir import CERTIFICATES, JobDir, JobsDir
from ravnest.provider.outcome import Outcome
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.providers import Assignment, ProviderView, SignedCertificate
from ravnest.store.bundle import load_stage
from ravnest.store.node_spec import NodeSpec, read_node
from ravnest.transport.certificates import Authority, signing_request

NOW = datetime.datetime.now(datetime.UTC)
ADDRESS = "127.0.0.1:20000"
OTHER = "10.0.0.5:20000"


@dataclass
class Member:
    """A provider that has an assignment of a real server."""

    server: LoopbackServer
    api: ApiClient
    wire: Wire
    assignment: str

    def fetch(self, job_dir: JobDir, check: Callable[[], None] = lambda: None) -> Any:
        return AssignmentDownload(self.api, (ADDRESS, OTHER)).run(self.assignment, job_dir, check)

    def change(self, **fields: Any) -> None:
        """Have the server's answer say something else about the assignment."""
        self.wire.alter[self._path] = lambda body: json.dumps(json.loads(body) | fields).encode()

    def change_node(self, **fields: Any) -> None:
        """Have the server's answer say something else about the node."""

        def changed(body: bytes) -> bytes:
            data = json.loads(body)
            return json.dumps(data | {"node_spec": data["node_spec"] | fields}).encode()

        self.wire.alter[self._path] = changed

    @property
    def _path(self) -> str:
        return f"GET /api/assignments/{self.assignment}"


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    wire = Wire()
    with (
        loopback_server(tmp_path_factory.mktemp("server")) as server,
        server.api(ApiRole.PROVIDER, "attic", wire) as api,
        server.submit(),
    ):
        provider = api.post("/api/providers", offer_of(address=ADDRESS), ProviderView).id
        yield Member(server, api, wire, next_assignment(api, provider))


@pytest.fixture
def member(joined: Member) -> Iterator[Member]:
    yield joined
    joined.wire.alter.clear()


@pytest.fixture
def job_dir(tmp_path: Path, joined: Member) -> JobDir:
    return JobsDir(tmp_path / "provider").job_dir(joined.assignment)


def is_complete(job_dir: JobDir) -> bool:
    return (job_dir.folder / "assignment.json").exists()


def test_a_job_folder_has_everything_that_the_worker_needs(member: Member, job_dir: JobDir) -> None:
    assignment, node = member.fetch(job_dir)
    assert assignment.id == member.assignment
    assert job_dir.read_assignment() == assignment
    assert read_node(job_dir.node_data, "node_0") == node
    assert load_stage(job_dir.node_data / node.bundle, node.sha256).spec.index == 0
    rows = (*assignment.train.inputs, *assignment.train.labels)
    assert rows
    assert all(job_dir.data_file(each.artifact).is_file() for each in rows)


def test_the_folder_of_a_node_that_had_finished_is_used_without_its_result(
    member: Member, job_dir: JobDir
) -> None:
    earlier = JobsDir(job_dir.folder.parent).job_dir("earlier")
    (earlier.checkpoints / "node_0").mkdir(parents=True)
    earlier.write_outcome(Outcome(is_root=True, title="node_0"))
    member.change(continues="earlier")
    member.fetch(job_dir)
    assert (job_dir.checkpoints / "node_0").is_dir()
    assert job_dir.read_outcome() is None, "after a restart the provider would send an old result"


def test_a_second_fetch_uses_the_files_of_the_first(member: Member, job_dir: JobDir) -> None:
    member.fetch(job_dir)
    before = len(member.wire.requests)
    member.fetch(job_dir)
    assert not [name for name in member.wire.requests[before:] if "/artifacts/" in name]


@pytest.mark.parametrize(
    "node",
    [
        {"node": 7},
        {"role": "Boss"},
        {"pipeline": "all"},
        {"roots": [{"node": 0}]},
        {"sha256": "0" * 64},
        {"address": "0.0.0.0:22"},
    ],
)
def test_a_node_spec_that_is_malformed_or_meant_for_another_is_refused(
    member: Member, job_dir: JobDir, node: dict[str, Any]
) -> None:
    member.change_node(**node)
    with pytest.raises(RavnestError):
        member.fetch(job_dir)
    assert not is_complete(job_dir)


@pytest.mark.parametrize(
    "node",
    [
        {"bundle": "../../outside"},
        {"bundle": "/etc"},
        {"certificates": {"authority": "../a", "certificate": "b", "key": "/root/key"}},
    ],
)
def test_paths_outside_of_the_folder_are_refused(
    member: Member, job_dir: JobDir, node: dict[str, Any], tmp_path: Path
) -> None:
    member.change_node(**node)
    with pytest.raises(ServerError, match="another format"):
        member.fetch(job_dir)
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_paths_of_the_server_are_not_used(member: Member, job_dir: JobDir, tmp_path: Path) -> None:
    member.change_node(bundle="nodes")
    _, found = member.fetch(job_dir)
    assert isinstance(found, NodeSpec)
    assert (found.bundle, found.certificates) == ("stage", CERTIFICATES)
    assert [path.name for path in tmp_path.iterdir()] == ["provider"]
    assert list((tmp_path / "provider").iterdir()) == [job_dir.folder]


def test_a_node_with_another_address_is_named(member: Member, job_dir: JobDir) -> None:
    member.change_node(address="0.0.0.0:22")
    with pytest.raises(StageFormatError, match=r"planned for 0\.0\.0\.0:22"):
        member.fetch(job_dir)


def test_a_node_can_have_any_address_of_the_provider(member: Member, job_dir: JobDir) -> None:
    member.change_node(address=OTHER)
    _, found = member.fetch(job_dir)
    assert found.address == OTHER


def test_another_assignment_is_refused(member: Member, job_dir: JobDir) -> None:
    member.change(id="other")
    with pytest.raises(ServerError, match=f"instead of {member.assignment}"):
        member.fetch(job_dir)


def test_files_that_do_not_fit_on_the_disk_are_refused(member: Member, job_dir: JobDir) -> None:
    assignment = member.api.get(f"/api/assignments/{member.assignment}", Assignment)
    member.change(weights={"sha256": assignment.weights.sha256, "size": 1 << 52})
    with pytest.raises(StageFormatError, match="--folder"):
        member.fetch(job_dir)


def test_a_stop_ends_a_fetch(member: Member, job_dir: JobDir) -> None:
    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        member.fetch(job_dir, check)
    assert not is_complete(job_dir)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/etc", ".hidden", "a\0b", "x" * 200, "a\n"])
def test_an_assignment_name_that_could_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StageFormatError):
        JobsDir(tmp_path).job_dir(name)


# Certificates


def test_the_key_stays_here_and_only_its_owner_can_read_it(member: Member, job_dir: JobDir) -> None:
    member.change(tls=True)
    member.fetch(job_dir)
    key = job_dir.node_data / CERTIFICATES.key
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    own = serialization.load_pem_private_key(key.read_bytes(), None)
    certificate = (job_dir.node_data / CERTIFICATES.certificate).read_bytes()
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
    with pytest.raises(ServerError, match="not a certificate"):
        write_certificate(
            tmp_path, key, signed.model_copy(update={"authority": other.certificate.decode()})
        )
    with pytest.raises(ServerError, match="not a certificate"):
        write_certificate(tmp_path, key, SignedCertificate(certificate="x", authority="y"))
    assert not list(tmp_path.iterdir())


def test_a_refusal_to_sign_is_passed_on(member: Member, job_dir: JobDir) -> None:
    member.change(tls=True)
    path = f"POST /api/assignments/{member.assignment}/certificate"
    member.wire.alter[path] = lambda _: httpx.Response(403, json={"detail": "not yours"})
    with pytest.raises(ServerRefusedError, match="not yours"):
        member.fetch(job_dir)
    assert not is_complete(job_dir)
