"""Certificate authority and the certificates that it issues.

``clusterize`` creates an authority for a plan and never writes its key, so no node can join the plan
later. The intermediary server has its own authority and one for each job, and signs keys that it never
sees.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=365)
_CLOCK_SKEW = datetime.timedelta(days=1)
"""Time by which the clock of another machine, or this one after a jump, may be behind."""
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # what a user writes for "this machine"


def certificate_name(node: int, generation: int = 0) -> str:
    """Return the name in the certificate of the machine that has this generation of a node."""
    return f"node_{node}-g{generation}" if generation else f"node_{node}"


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Certificate authority; kept in memory unless the caller writes its ``identity``."""

    def __init__(
        self,
        name: str,
        now: datetime.datetime,
        *,
        lifetime: datetime.timedelta = _LIFETIME,
        saved: Identity | None = None,
    ) -> None:
        """Create a new authority or load ``saved``; ``ValueError`` if that is invalid or expired."""
        self._now = now
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        if saved is None:
            self._key = ec.generate_private_key(ec.SECP256R1())
            self._end = now + lifetime
            self._certificate = (
                self._builder(self._name, self._key.public_key())
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_usage(signs_certificates=True), critical=True)
                .sign(self._key, hashes.SHA256())
            )
        else:
            self._key, self._certificate = _loaded(saved, now)
            self._name = self._certificate.subject
            self._end = min(now + lifetime, self._certificate.not_valid_after_utc)

    @property
    def certificate(self) -> bytes:
        """Certificate of the authority (PEM), which every node trusts."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def identity(self) -> Identity:
        """Certificate and private key of the authority; must be stored where nobody else can read it."""
        return Identity(self.certificate, _private(self._key))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the authority: SHA-256 of its certificate (DER), hexadecimal."""
        return self._certificate.fingerprint(hashes.SHA256()).hex()

    def issue(self, name: str, hosts: Iterable[str]) -> Identity:
        """Return a certificate and key for a node at ``hosts``, for use as server and client.

        The certificate is also valid for the node's own name: peers check the name, not the address.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = _alternatives([*hosts, name])
        return Identity(self._issue(name, names, key.public_key()), _private(key))

    def sign(self, request: bytes, name: str) -> bytes:
        """Return a certificate (PEM) for the key of a signing request (PEM), valid for ``name`` only.

        Only the key of the request is used: the sender cannot choose a name. Hosts of the sender are
        left out as well, because they are its own words: a host that is called ``node_0.`` passes for
        ``node_0``. ``ValueError`` if the request is invalid, or not signed with its key.
        """
        parsed = x509.load_pem_x509_csr(request)
        if not parsed.is_signature_valid:
            raise ValueError("the signing request is not signed with its own key")
        match parsed.public_key():
            case ec.EllipticCurvePublicKey(curve=ec.SECP256R1()) as key:
                return self._issue(name, [x509.DNSName(name)], key)
            case _:
                raise ValueError("the signing request must be for a key on the curve P-256")

    def _issue(
        self, name: str, valid_for: Iterable[x509.GeneralName], key: ec.EllipticCurvePublicKey
    ) -> bytes:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(list(valid_for)), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _CLOCK_SKEW)
            .not_valid_after(self._end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )


def signing_request(name: str) -> tuple[bytes, bytes]:
    """Return a signing request (PEM) for a new key, and the key (PEM), which stays with the caller."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM), _private(key)


def _loaded(
    saved: Identity, now: datetime.datetime
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    certificate = x509.load_pem_x509_certificate(saved.certificate)
    key = serialization.load_pem_private_key(saved.key, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError("the certificate and the key of the authority do not belong together")
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        raise ValueError(
            f"the certificate of the authority is valid from {certificate.not_valid_before_utc} to "
            f"{certificate.not_valid_after_utc}, but not now"
        )
    return key, certificate


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives(hosts: Iterable[str]) -> Iterable[x509.GeneralName]:
    names = {"127.0.0.1" if host in _EVERYWHERE else host for host in hosts} | {"localhost"}
    for name in sorted(names):
        try:
            yield x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            yield x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
