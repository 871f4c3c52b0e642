"""How averages travel, and who decides it."""

from __future__ import annotations

import pytest
import torch
from round_cases import Case

from ravnest.averaging.compression import RoundCompression
from ravnest.averaging.events import PreparedArrived, SendToCluster
from ravnest.wire.messages import Prepared, RoundId, Start

LAST = RoundId(3)


def decided(wishes: list[tuple[str, RoundId | None]], *, final: bool = False) -> Start:
    """The Go of a round whose clusters wish to compress like this."""
    case = Case(len(wishes), first_round=4)
    for cluster in range(len(wishes) if final else 1):
        case.due(cluster, final=final)
    for cluster, (codec, base) in enumerate(wishes):
        actions = case.feed(PreparedArrived(Prepared(case.round, cluster, cluster, 1, "", codec, base)))
    (head,) = {repr(a.head): a.head for a in actions if isinstance(a, SendToCluster)}.values()
    assert isinstance(head, Start)
    return head


def test_compressed_if_all_want_the_same_and_know_the_same_average() -> None:
    go = decided([("int8", LAST), ("int8", LAST)])
    assert (go.codec, go.base) == ("int8", LAST)


@pytest.mark.parametrize(
    "wishes",
    [
        [("int8", LAST), ("fp16", LAST)],
        [("int8", LAST), ("int8", RoundId(2))],
        [("int8", None), ("int8", None)],
        [("int8", LAST), ("raw", None)],
    ],
    ids=["other codecs", "another average", "no average", "no wish"],
)
def test_else_as_it_is(wishes: list[tuple[str, RoundId | None]]) -> None:
    assert (decided(wishes).codec, decided(wishes).base) == ("raw", None)


def test_the_end_result_is_exact() -> None:
    assert decided([("int8", LAST), ("int8", LAST)], final=True).codec == "raw"


PLAIN = Start(LAST, {0: 0.5, 1: 0.5})
COMPRESSED = Start(RoundId(4), {0: 0.5, 1: 0.5}, "fp16", LAST)


def after_a_round(codec: str, average: torch.Tensor) -> RoundCompression:
    """That has averaged once."""
    coding = RoundCompression(codec)
    vector = coding.outgoing(PLAIN, {0: torch.zeros_like(average)})[0]
    coding.landing(PLAIN, 0, vector, len(vector)).keep(0, len(vector), average)
    assert coding.base is None, "not before it is applied"
    coding.settled(LAST, applied=True)
    return coding


def test_changes_since_the_last_average_enter_and_come_out() -> None:
    last = torch.full((200,), 1000.0)
    coding = after_a_round("fp16", last)
    assert coding.base == LAST
    held = last + torch.linspace(0, 0.5, 200)
    change = coding.outgoing(COMPRESSED, {0: held.clone()})[0]
    assert change.abs().max() <= 0.5
    landing = coding.landing(COMPRESSED, 0, change, moving=100)
    landing.keep(0, 200, torch.full((200,), 0.25))
    assert change[:100].allclose(last[:100] + 0.25 - held[:100], atol=1e-4)
    assert change[100:].tolist() == [1000.25] * 100
    assert coding.bytes_of(COMPRESSED)(change) == 400
    assert coding.roundtrip(PLAIN, 0) is None
    assert coding.bytes_of(PLAIN)(held) == 800


def test_a_round_that_comes_to_nothing_spoils_the_last_average() -> None:
    coding = after_a_round("fp16", torch.ones(200))
    change = coding.outgoing(COMPRESSED, {0: torch.ones(200)})[0]
    coding.landing(COMPRESSED, 0, change, moving=200).keep(0, 100, torch.ones(100))
    coding.settled(RoundId(4), applied=False)
    assert coding.base is None


def test_errors_are_made_up_for_unless_their_round_came_to_nothing() -> None:
    coding = after_a_round("int8", torch.zeros(256))
    go = Start(RoundId(4), {0: 0.5, 1: 0.5}, "int8", LAST)
    meant = torch.linspace(-1, 1, 256) ** 3
    first = coding.roundtrip(go, 0)
    assert first is not None
    arrived = first("0/0", meant)
    total = arrived.clone()
    for _ in range(9):
        again = coding.roundtrip(go, 0)
        assert again is not None
        total += again("0/0", meant)
    assert (total - 10 * meant).abs().max() <= 1.02 / 254, "one rounding, not ten"
    coding.settled(RoundId(4), applied=False)
    afresh = coding.roundtrip(go, 0)
    assert afresh is not None
    assert torch.equal(afresh("0/0", meant), arrived)


def test_without_compression_nothing_is_kept() -> None:
    assert after_a_round("raw", torch.ones(200)).base is None
