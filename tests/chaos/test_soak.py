"""What the soak calls flat."""

from __future__ import annotations

from soak import LEAST_SAMPLES, Sample, growth, report


def samples(node: str, rss: float, sockets: float, *, pids: int = 1) -> list[Sample]:
    """Return samples of a process whose figures grow by so much per sample."""
    return [
        Sample(3.0 * n, node, n * pids // 100, 300 + rss * n, 30, 12, int(8 + sockets * n))
        for n in range(100)
    ]


def test_figures_that_stay_are_flat() -> None:
    found = growth(samples("node_0", 0.0, 0.0))
    assert [(each.figure, each.flat) for each in found] == [
        ("rss", True),
        ("threads", True),
        ("files", True),
        ("sockets", True),
    ]


def test_figures_that_grow_are_named() -> None:
    found = growth(samples("node_0", 1.0, 0.1))
    assert {each.figure: each.flat for each in found} == {
        "rss": False,
        "threads": True,
        "files": True,
        "sockets": False,
    }
    assert report(found).count("GROWS") == 2


def test_growth_at_the_begin_is_left_out() -> None:
    warming = samples("node_0", 0.0, 0.0)
    warming[:10] = [Sample(3.0 * n, "node_0", 0, 10.0 * n, n, 12, 8) for n in range(10)]
    assert all(each.flat for each in growth(warming))


def test_processes_that_were_started_again_say_nothing() -> None:
    assert growth(samples("node_1", 1.0, 0.1, pids=3)) == []
    assert growth(samples("node_0", 1.0, 0.1)[: LEAST_SAMPLES - 1]) == []
    assert growth([]) == []
