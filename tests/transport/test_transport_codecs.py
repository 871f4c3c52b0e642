"""Codec of a link: used only if both ends prefer it, and only for messages that may be lossy."""

import logging

import pytest
import torch
from transport_nodes import SECONDS, Opener, Pair, connect

from ravnest.transport.link import agreed_codec
from ravnest.types import MicrobatchId
from ravnest.wire.messages import (
    PROTOCOL,
    AnyHead,
    Backward,
    Forward,
    ForwardResult,
    Hello,
    Message,
    RingChunk,
    RoundId,
    StageSaved,
)

MICROBATCH = MicrobatchId(0, 0)
LOSSY: list[AnyHead] = [
    Forward("run", MICROBATCH, 1),
    Backward("run", MICROBATCH),
    RingChunk(RoundId(0), 0, 0, 0, 0),
]
EXACT: list[AnyHead] = [StageSaved("run", 0, "{}"), ForwardResult("run", MICROBATCH)]
NUMBERS = torch.linspace(-1, 1, 1 << 14)


def received(pair: Pair, head: AnyHead, *, exact: frozenset[str] = frozenset()) -> torch.Tensor:
    pair.near.send(Message(head, {"x": NUMBERS}, exact))
    value = pair.far_inbox.next().values["x"]
    assert isinstance(value, torch.Tensor)
    assert torch.allclose(value, NUMBERS, atol=0.01)
    return value


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_a_codec_that_both_ends_prefer_is_used(transport: Opener, codec: str) -> None:
    pair = connect(transport(), transport(), codecs=(codec, codec))
    for head in LOSSY:
        assert not received(pair, head).equal(NUMBERS)
        assert received(pair, head, exact=frozenset({"x"})).equal(NUMBERS)
    for head in EXACT:
        assert received(pair, head).equal(NUMBERS)


@pytest.mark.parametrize("codecs", [("int8", "raw"), ("raw", "fp16"), ("fp16", "int8")])
def test_different_codecs_mean_no_compression(
    transport: Opener, codecs: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    pair = connect(transport(), transport(), codecs=codecs)
    for _ in range(3):
        assert received(pair, LOSSY[0]).equal(NUMBERS)
    logged = [record.getMessage() for record in caplog.records if "sent uncompressed" in record.message]
    ours = f"node_0 prefers codec {codecs[0]} and node_1 {codecs[1]}"
    assert sum(ours in line for line in logged) == 1
    assert len(logged) == 2, "each end logs it once"


def test_no_warning_without_compression(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert received(pair, LOSSY[0]).equal(NUMBERS)
    assert not caplog.records


def test_an_unknown_codec_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ours, theirs = (Hello(PROTOCOL, "plan", n, 0, n, codec="zip" * 1000) for n in (0, 1))
        assert agreed_codec(ours, theirs).name == "raw"
    assert all(len(record.getMessage()) < 200 for record in caplog.records)


def test_fewer_bytes_are_sent_and_clamped_values_are_counted(transport: Opener) -> None:
    sent = {}
    for codec in ("raw", "fp16", "int8"):
        pair = connect(transport(), transport(), codecs=(codec, codec))
        received(pair, LOSSY[0])
        assert pair.near.flush(SECONDS)
        sent[codec] = pair.near.sent_bytes
        pair.near.send(Message(LOSSY[0], {"x": torch.full((300,), 1e6)}))
        pair.far_inbox.next()
        assert pair.near.clamped == (300 if codec == "fp16" else 0)
        assert pair.far.clamped == 0
    assert sent["raw"] > 1.9 * sent["fp16"]
    assert sent["raw"] > 3.6 * sent["int8"]
