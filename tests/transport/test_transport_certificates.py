"""Saved authorities and signing requests."""

import datetime
import hashlib
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from ravnest.transport.certificates import Authority, Identity, signing_request

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


def parsed(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def test_a_saved_authority_can_sign() -> None:
    first = Authority("plan", NOW, lifetime=100 * DAY)
    again = Authority("ignored", NOW + DAY, saved=first.identity)
    assert again.certificate == first.certificate
    issued = parsed(again.issue("node_0", ["10.0.0.1"]).certificate)
    issued.verify_directly_issued_by(parsed(first.certificate))
    assert issued.issuer.rfc4514_string() == "CN=plan"


def test_the_fingerprint_is_that_of_the_certificate() -> None:
    authority = Authority("plan", NOW)
    der = ssl.PEM_cert_to_DER_cert(authority.certificate.decode())
    assert authority.fingerprint == hashlib.sha256(der).hexdigest()


def test_certificates_do_not_outlive_a_saved_authority() -> None:
    first = Authority("plan", NOW, lifetime=100 * DAY)
    again = Authority("plan", NOW + 99 * DAY, saved=first.identity)
    issued = parsed(again.issue("node_0", []).certificate)
    assert issued.not_valid_after_utc == parsed(first.certificate).not_valid_after_utc


@pytest.mark.parametrize("late", [-2 * DAY, 100 * DAY])
def test_an_authority_that_is_not_valid_now_is_refused(late: datetime.timedelta) -> None:
    first = Authority("plan", NOW, lifetime=100 * DAY)
    with pytest.raises(ValueError, match="not now"):
        Authority("plan", NOW + late, saved=first.identity)


def test_a_certificate_with_another_key_is_refused() -> None:
    first, other = Authority("plan", NOW), Authority("plan", NOW)
    with pytest.raises(ValueError, match="do not belong together"):
        Authority("plan", NOW, saved=Identity(first.certificate, other.identity.key))


def test_only_the_key_of_a_signing_request_is_used() -> None:
    authority = Authority("job", NOW)
    request, key = signing_request("node_9")
    signed = parsed(authority.sign(request, "node_1"))
    assert signed.subject.rfc4514_string() == "CN=node_1"
    private = serialization.load_pem_private_key(key, password=None)
    assert signed.public_key() == private.public_key()
    with pytest.raises(ValueError):
        authority.sign(b"nonsense", "node_1")
