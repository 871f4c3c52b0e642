"""Authentication: tokens, credentials, certificates, and the record of refusals."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from server_cases import Time, opened

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole, hashed
from ravnest.server.auth.tokens import AuthService
from ravnest.server.db.database import Database
from ravnest.server.folder import ServerFolder
from ravnest.transport.certificates import signing_request


class Scene:
    def __init__(self, path: Path) -> None:
        self.time = Time(now=1_790_000_000.0)
        self.folder = ServerFolder(path)
        self.folder.make()
        self.db = Database(self.folder.database)
        self.db.open()
        self.auth = AuthService(self.db, self.folder, self.time.clock())
        self.auth.open()

    def refusals(self) -> list[str]:
        with self.db.read() as db:
            return [event.reason for event in db.events.after(0) if event.kind == "refusal"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_token_is_exchanged_for_a_credential(scene: Scene) -> None:
    token = scene.auth.create_token(ApiRole.PROVIDER, "ab12")
    assert str(token).startswith("rvn.ab12.")
    joined = scene.auth.join(token.secret, "alice", "127.0.0.1")
    assert joined.role is ApiRole.PROVIDER
    assert scene.auth.member(joined.credential, "127.0.0.1").id == joined.id


def test_a_token_works_as_often_as_its_uses_allow(scene: Scene) -> None:
    once = scene.auth.create_token(ApiRole.PROVIDER, "").secret
    twice = scene.auth.create_token(ApiRole.PROVIDER, "", uses=2).secret
    often = scene.auth.create_token(ApiRole.PROVIDER, "", uses=None).secret
    for secret, uses in [(once, 1), (twice, 2)]:
        for _ in range(uses):
            scene.auth.join(secret, "alice", "10.0.0.1")
        with pytest.raises(ServerRefusedError, match="used already") as caught:
            scene.auth.join(secret, "mallory", "10.0.0.1")
        assert caught.value.status == 401
    ids = {scene.auth.join(often, "alice", "10.0.0.1").id for _ in range(5)}
    assert len(ids) == 5
    assert len(scene.refusals()) == 2
    assert all("mallory" in each and "10.0.0.1" in each for each in scene.refusals())


def test_expired_and_unknown_tokens_are_refused_and_recorded(scene: Scene) -> None:
    token = scene.auth.create_token(ApiRole.PROVIDER, "", uses=None, hours=1)
    scene.time.now += 3600
    for secret, words in [(token.secret, "expired"), ("no such secret", "does not know")]:
        with pytest.raises(ServerRefusedError, match=words):
            scene.auth.join(secret, "mallory", "10.0.0.1")
    assert len(scene.refusals()) == 2


def test_an_unknown_or_expired_credential_is_refused(scene: Scene) -> None:
    token = scene.auth.create_token(ApiRole.VIEWER, "")
    joined = scene.auth.join(token.secret, "a browser", "x", expires=scene.time.now + 10)
    scene.auth.member(joined.credential, "x")
    scene.time.now += 10
    for credential in (joined.credential, "forged"):
        with pytest.raises(ServerRefusedError) as caught:
            scene.auth.member(credential, "10.0.0.1")
        assert caught.value.status == 401
    assert len(scene.refusals()) == 2


def test_the_folder_contains_no_secret(scene: Scene, tmp_path: Path) -> None:
    token = scene.auth.create_token(ApiRole.PROVIDER, "")
    joined = scene.auth.join(token.secret, "alice", "x")
    with pytest.raises(ServerRefusedError) as caught:
        scene.auth.join(token.secret, "alice", "x")
    with pytest.raises(ServerRefusedError):
        scene.auth.member("a-forged-credential", "x")
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (token.secret, joined.credential, "a-forged-credential"):
        assert secret.encode() not in everything
        assert secret not in str(caught.value)
    assert hashed(joined.credential).encode() in everything


def test_only_the_owner_can_read_keys_and_the_admin_credential(scene: Scene) -> None:
    scene.auth.sign("job-1", 0, signing_request("x")[0].decode())
    secret = [
        scene.folder.admin,
        *scene.folder.authority.glob("*.key"),
        *scene.folder.job_authorities.glob("*.key"),
    ]
    assert len(secret) == 3
    for path in secret:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_authority_and_the_admin_credential_are_kept(scene: Scene) -> None:
    fingerprint, admin = scene.auth.fingerprint, scene.folder.admin.read_text()
    again = AuthService(scene.db, scene.folder, scene.time.clock())
    again.open()
    assert again.fingerprint == fingerprint
    assert scene.folder.admin.read_text() == admin
    assert again.member(admin, "x").role is ApiRole.ADMIN


def test_a_deleted_admin_credential_is_replaced(scene: Scene) -> None:
    old = scene.folder.admin.read_text()
    scene.folder.admin.unlink()
    scene.auth.open()
    assert scene.auth.member(scene.folder.admin.read_text(), "x").role is ApiRole.ADMIN
    with pytest.raises(ServerRefusedError):
        scene.auth.member(old, "x")


def test_a_node_certificate_has_only_the_name_of_the_plan(scene: Scene) -> None:
    request, _key = signing_request("node_7")
    signed = scene.auth.sign("job-1", 2, request.decode())
    certificate = x509.load_pem_x509_certificate(signed.certificate.encode())
    authority = x509.load_pem_x509_certificate(signed.authority.encode())
    certificate.verify_directly_issued_by(authority)
    assert certificate.subject.rfc4514_string() == "CN=node_2"
    later = scene.auth.sign("job-1", 2, request.decode(), generation=3)
    certificate_of_next = x509.load_pem_x509_certificate(later.certificate.encode())
    assert certificate_of_next.subject.rfc4514_string() == "CN=node_2-g3"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName("node_2")]
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca


def test_each_job_has_its_own_authority_until_it_ends(scene: Scene) -> None:
    request = signing_request("x")[0].decode()
    first, again, other = (scene.auth.sign(job, 0, request) for job in ("a", "a", "b"))
    assert first.authority == again.authority
    assert other.authority not in (first.authority, scene.auth.authority)
    scene.auth.forget_job("a")
    assert sorted(path.name for path in scene.folder.job_authorities.iterdir()) == ["b.key", "b.pem"]


def weak_request() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return pem(
        x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    )


def tampered_request() -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    der = bytearray(made.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    return pem(x509.load_der_x509_csr(bytes(der)))


def pem(request: x509.CertificateSigningRequest) -> str:
    return request.public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize("request_of", [lambda: "nonsense", weak_request, tampered_request])
def test_an_invalid_signing_request_is_refused(scene: Scene, request_of: object) -> None:
    with pytest.raises(ServerRefusedError, match="cannot be signed") as caught:
        scene.auth.sign("job-1", 0, request_of())  # type: ignore[operator]
    assert caught.value.status == 422


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(Exception, match="another server uses"), opened(tmp_path):
        pass
