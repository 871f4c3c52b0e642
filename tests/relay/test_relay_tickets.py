import base64
import random

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from relay_keys import KEY, PUBLIC

from ravnest.errors import RelayError
from ravnest.relay.tickets import Endpoint, RelayTicket, read_ticket, sign_ticket

TICKET = RelayTicket("job-a", 3, (2, 4), 1000.0)


def signed(body: bytes, key: Ed25519PrivateKey = KEY) -> str:
    return base64.urlsafe_b64encode(key.sign(body) + body).rstrip(b"=").decode()


def body(**changes: object) -> bytes:
    plain: dict[str, object] = {"job": "job-a", "node": 3, "peers": [2, 4], "expires": 1000.0}
    return msgspec.json.encode({**plain, **changes})


def test_a_ticket_is_read_as_it_was_signed() -> None:
    text = sign_ticket(TICKET, KEY)
    assert read_ticket(text, PUBLIC, 999.0) == TICKET
    assert read_ticket(signed(body()), PUBLIC, 0.0) == TICKET
    assert text.replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize("now", [1000.0, 1000.1, 1e12, float("inf")])
def test_an_expired_ticket_is_refused(now: float) -> None:
    with pytest.raises(RelayError, match="expired"):
        read_ticket(sign_ticket(TICKET, KEY), PUBLIC, now)


def test_a_ticket_of_another_key_is_refused() -> None:
    with pytest.raises(RelayError, match="not signed by the server"):
        read_ticket(sign_ticket(TICKET, Ed25519PrivateKey.generate()), PUBLIC, 0.0)


def test_every_changed_byte_is_noticed() -> None:
    raw = base64.urlsafe_b64decode(sign_ticket(TICKET, KEY) + "==")
    for place in range(len(raw)):
        forged = bytearray(raw)
        forged[place] ^= 1
        with pytest.raises(RelayError):
            read_ticket(base64.urlsafe_b64encode(forged).rstrip(b"=").decode(), PUBLIC, 0.0)


def test_every_truncation_is_noticed() -> None:
    text = sign_ticket(TICKET, KEY)
    for length in range(len(text)):
        with pytest.raises(RelayError):
            read_ticket(text[:length], PUBLIC, 0.0)


@pytest.mark.parametrize(
    "content",
    [
        body(admin=True),
        body(peers=[2, "4"]),
        body(peers=None),
        body(node=3.5),
        body(job=7),
        body(expires="never"),
        b"{}",
        b"[]",
        b"",
        b"null",
        b"\xff\xfe",
        b"[" * 10_000,
    ],
)
def test_signed_content_that_is_no_ticket_is_refused(content: bytes) -> None:
    with pytest.raises(RelayError):
        read_ticket(signed(content), PUBLIC, 0.0)


def test_a_huge_ticket_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RelayError, match="too long"):
        read_ticket("A" * 16_385, PUBLIC, 0.0)


@pytest.mark.parametrize("text", ["", "!", "é" * 200, "A", "AAAA" * 20, "\0" * 100, "💥" * 50])
def test_text_that_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(RelayError):
        read_ticket(text, PUBLIC, 0.0)


def test_random_text_is_refused() -> None:
    dice = random.Random(0)
    for _ in range(500):
        text = "".join(chr(dice.randrange(1, 300)) for _ in range(dice.randrange(300)))
        with pytest.raises(RelayError):
            read_ticket(text, PUBLIC, 0.0)


def test_endpoints_are_parsed_as_they_are_written() -> None:
    assert (
        Endpoint.parse(str(Endpoint("job-a", 12)))
        == Endpoint("job-a", 12)
        == Endpoint.parse("node-12.job-a")
    )
    assert RelayTicket("j.k", 0, (), 0.0).endpoint == Endpoint.parse("node-0.j.k")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node-1",
        "node-1.",
        "node-.a",
        "1.a",
        "node--1.a",
        "node-1²3.a",
        "NODE-1.a",
        "node-" + "9" * 5000 + ".a",
    ],
)
def test_text_that_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Endpoint.parse(text)
