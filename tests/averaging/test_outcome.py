"""Description of a round's outcome."""

from __future__ import annotations

from ravnest.averaging.outcome import RoundOutcome, size
from ravnest.wire.messages import RoundId


def test_a_round_in_one_line() -> None:
    outcome = RoundOutcome(
        RoundId(3),
        "background",
        committed=True,
        reason="",
        weights={0: 0.6, 1: 0.4},
        missing={2: "no reply within 1.5 s"},
        sent_bytes=12_897_485,
        seconds=0.42,
    )
    assert outcome.describe() == (
        "round 3: averaged clusters 0, 1 (weights 0.60, 0.40), 12.3 MiB sent in 0.42 s;"
        " cluster 2 missing: no reply within 1.5 s"
    )


def test_a_failed_round_with_its_reason() -> None:
    outcome = RoundOutcome(
        RoundId(9, 2),
        "final",
        committed=False,
        reason="given up",
        weights={},
        missing={},
        problems={1: "node_3: NaN in layer.weight"},
    )
    assert outcome.describe() == (
        "final round 9 (attempt 3): nothing averaged: given up;"
        " cluster 1 only received: node_3: NaN in layer.weight"
    )


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3072.0 GiB",
    ]
