import random

import pytest

from ravnest.errors import RelayError
from ravnest.relay.heads import (
    LONGEST_HEAD,
    HeadReader,
    RelayMethod,
    RequestHead,
    answer,
    parse_answer,
    parse_request,
    request,
)
from ravnest.relay.lines import LineReader


def test_requests_are_parsed_as_they_are_written() -> None:
    for method in RelayMethod:
        for ticket in ("", "abc-_"):
            head, rest = HeadReader().feed(request(method, "node-1.job-a", ticket)) or (b"", b"?")
            assert parse_request(head) == RequestHead(method, "node-1.job-a", ticket)
            assert rest == b""


@pytest.mark.parametrize("stays", [True, False])
def test_answers_are_parsed_as_they_are_written(stays: bool) -> None:
    head, rest = HeadReader().feed(answer(429, "too many circuits", stays=stays)) or (b"", b"?")
    assert (parse_answer(head), rest) == ((429, "too many circuits"), b"")


def test_a_head_arrives_in_any_pieces() -> None:
    dice = random.Random(0)
    whole = request(RelayMethod.REGISTER, "node-1.a", "t" * 500)
    for _ in range(200):
        reader, data = HeadReader(), whole + b"\r\n\r\nrest"
        found = None
        while found is None:
            count = dice.randrange(1, 40)
            piece, data = data[:count], data[count:]
            assert piece
            found = reader.feed(piece)
        assert found[0] + b"\r\n\r\n" == whole
        assert found[1] + data == b"\r\n\r\nrest"
        assert reader.room == LONGEST_HEAD


def test_a_head_without_end_is_refused_and_never_kept_beyond_its_bound() -> None:
    reader = HeadReader()
    while reader.room > 1:
        assert reader.feed(b"x" * min(1000, reader.room - 1)) is None
    with pytest.raises(RelayError, match="more than"):
        reader.feed(b"x")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\r\n",
        b"GET",
        b"get /ping HTTP/1.1",
        b"DELETE / HTTP/1.1",
        b"GET /ping HTTP/2",
        b"GET  /ping HTTP/1.1",
        b"GET /ping HTTP/1.1 ",
        b"GET /ping\nHTTP/1.1",
        b"GET /\xc3\xa9 HTTP/1.1",
        b"GET /\x00 HTTP/1.1",
        b"CONNECT " + b"x" * 401 + b" HTTP/1.1",
        b"GET /ping HTTP/1.1\r\nno field",
        b"GET /ping HTTP/1.1\r\n folded: x",
        b"GET /ping HTTP/1.1\r\nA : b",
        b"GET /ping HTTP/1.1\r\nA: \x01",
        b"CONNECT a HTTP/1.1\r\nAuthorization: Bearer a\r\nAuthorization: Bearer a",
        b"CONNECT a HTTP/1.1\r\nAuthorization: Digest a",
        b"CONNECT a HTTP/1.1\r\nAuthorization: Basic dGlja2V0OmFiYw==",
        bytes(range(256)),
    ],
)
def test_hostile_heads_are_refused(head: bytes) -> None:
    with pytest.raises(RelayError):
        parse_request(head)


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1", b"HTTP/1.1 20 x", b"HTTP/1.1 2000 x", b"\xff", b"SSH-2.0"]
)
def test_hostile_answers_are_refused(head: bytes) -> None:
    with pytest.raises(RelayError):
        parse_answer(head)


def test_random_bytes_are_parsed_or_refused() -> None:
    dice = random.Random(0)
    parts = [
        b"GET ",
        b"CONNECT ",
        b"/ping",
        b" HTTP/1.1",
        b"\r\n",
        b": ",
        b"Authorization",
        b"Bearer ",
        b"\xff",
        b"=",
    ]
    for _ in range(3000):
        head = b"".join(dice.choice(parts) for _ in range(dice.randrange(12)))
        for parse in (parse_request, parse_answer):
            try:
                parse(head)
            except RelayError:
                continue


def test_lines_arrive_in_any_pieces() -> None:
    reader = LineReader()
    assert reader.feed(b"PI") == []
    assert reader.feed(b"NG\nINCOMING a") == ["PING"]
    assert reader.feed(b"b\nPING\n") == ["INCOMING ab", "PING"]


@pytest.mark.parametrize("data", [b"x" * 201, b"x" * 201 + b"\n", b"\xff\n"])
def test_hostile_lines_are_refused(data: bytes) -> None:
    with pytest.raises(RelayError):
        LineReader().feed(data)
