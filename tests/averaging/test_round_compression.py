"""Choice of the codec of a round, and the state of compression between rounds."""

from __future__ import annotations

import pytest
import torch
from round_cases import Case

from ravnest.averaging.compression import RoundCompression
from ravnest.averaging.events import PreparedArrived, SendToCluster
from ravnest.wire.messages import Prepared, RoundId, Start

LAST = RoundId(3)


def decided(wishes: list[tuple[str, RoundId | None]], *, final: bool = False) -> Start:
    """Return the Start of a round whose clusters ask for these codecs and bases."""
    case = Case(len(wishes), first_round=4)
    for cluster in range(len(wishes) if final else 1):
        case.request(cluster, final=final)
    for cluster, (codec, base) in enumerate(wishes):
        actions = case.feed(PreparedArrived(Prepared(case.round, cluster, cluster, 1, "", codec, base)))
    (head,) = {repr(a.head): a.head for a in actions if isinstance(a, SendToCluster)}.values()
    assert isinstance(head, Start)
    return head


def test_compressed_if_all_ask_for_the_same_codec_and_base() -> None:
    start = decided([("int8", LAST), ("int8", LAST)])
    assert (start.codec, start.base) == ("int8", LAST)


@pytest.mark.parametrize(
    "wishes",
    [
        [("int8", LAST), ("fp16", LAST)],
        [("int8", LAST), ("int8", RoundId(2))],
        [("int8", None), ("int8", None)],
        [("int8", LAST), ("raw", None)],
    ],
    ids=["other codecs", "other bases", "no base", "no codec"],
)
def test_otherwise_values_travel_unchanged(wishes: list[tuple[str, RoundId | None]]) -> None:
    assert (decided(wishes).codec, decided(wishes).base) == ("raw", None)


def test_the_final_round_is_exact() -> None:
    assert decided([("int8", LAST), ("int8", LAST)], final=True).codec == "raw"


PLAIN = Start(LAST, {0: 0.5, 1: 0.5})
COMPRESSED = Start(RoundId(4), {0: 0.5, 1: 0.5}, "fp16", LAST)


def after_a_round(codec: str, average: torch.Tensor) -> RoundCompression:
    """Return the compression of a node that has averaged once."""
    compression = RoundCompression(codec)
    vector = compression.outgoing(PLAIN, {0: torch.zeros_like(average)})[0]
    compression.sink(PLAIN, 0, vector, len(vector)).keep(0, len(vector), average)
    assert compression.base is None, "the average is not applied yet"
    compression.settled(LAST, applied=True)
    return compression


def test_the_change_since_the_last_average_is_averaged() -> None:
    last = torch.full((200,), 1000.0)
    compression = after_a_round("fp16", last)
    assert compression.base == LAST
    copy = last + torch.linspace(0, 0.5, 200)
    change = compression.outgoing(COMPRESSED, {0: copy.clone()})[0]
    assert change.abs().max() <= 0.5
    sink = compression.sink(COMPRESSED, 0, change, moving=100)
    sink.keep(0, 200, torch.full((200,), 0.25))
    assert change[:100].allclose(last[:100] + 0.25 - copy[:100], atol=1e-4)
    assert change[100:].tolist() == [1000.25] * 100
    assert compression.bytes_of(COMPRESSED)(change) == 400
    assert compression.roundtrip(PLAIN, 0) is None
    assert compression.bytes_of(PLAIN)(copy) == 800


def test_a_failed_round_discards_the_last_average() -> None:
    compression = after_a_round("fp16", torch.ones(200))
    change = compression.outgoing(COMPRESSED, {0: torch.ones(200)})[0]
    compression.sink(COMPRESSED, 0, change, moving=200).keep(0, 100, torch.ones(100))
    compression.settled(RoundId(4), applied=False)
    assert compression.base is None


def test_errors_are_corrected_unless_their_round_failed() -> None:
    compression = after_a_round("int8", torch.zeros(256))
    start = Start(RoundId(4), {0: 0.5, 1: 0.5}, "int8", LAST)
    exact = torch.linspace(-1, 1, 256) ** 3
    first = compression.roundtrip(start, 0)
    assert first is not None
    received = first("0/0", exact)
    total = received.clone()
    for _ in range(9):
        again = compression.roundtrip(start, 0)
        assert again is not None
        total += again("0/0", exact)
    assert (total - 10 * exact).abs().max() <= 1.02 / 254, "one rounding, not ten"
    compression.settled(RoundId(4), applied=False)
    afresh = compression.roundtrip(start, 0)
    assert afresh is not None
    assert torch.equal(afresh("0/0", exact), received)


def test_without_compression_there_is_no_base() -> None:
    assert after_a_round("raw", torch.ones(200)).base is None
