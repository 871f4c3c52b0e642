"""Figures of a provider for Prometheus: sums over assignments, and the page."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from ravnest.errors import SettingsError
from ravnest.logs.metrics_page import metrics_page
from ravnest.logs.prometheus import exposition
from ravnest.provider.assignment_progress import AssignmentProgress
from ravnest.provider.figures import ProviderFigures, provider_figures
from ravnest.schemas.providers import ProviderOffer
from ravnest.telemetry import WorkRecord
from ravnest.types import Address

OFFER = ProviderOffer(
    name="alice",
    address="127.0.0.1:9000",
    ram=2.0,
    cores=2,
    compute=10,
    bandwidth=100,
    round_trip=0.01,
    version="1",
    torch="2",
)


def _text(figures: ProviderFigures) -> str:
    return exposition(provider_figures(OFFER, 4_000_000, figures.snapshot))


def _trained(samples: int) -> AssignmentProgress:
    work = AssignmentProgress("a", phase="training")
    work.take([WorkRecord(1, 0, 0, 0.0, 0, 0)], 0.0)
    work.take([WorkRecord(3, 0, samples, 0.5, 100, 50)], 2.0)
    return work


def test_counters_go_on_with_the_next_assignment() -> None:
    figures = ProviderFigures()
    figures.note(None, 0, is_connected=True)
    figures.note(_trained(10), 1000, is_connected=True)
    text = _text(figures)
    assert 'ravnest_provider_state{state="training"} 1\n' in text
    assert 'ravnest_provider_state{state="offered"} 0\n' in text
    assert "ravnest_provider_used_memory_bytes 1000\n" in text
    assert "ravnest_provider_offered_memory_bytes 4000000\n" in text
    assert "ravnest_provider_samples_per_second 5\n" in text
    assert "ravnest_provider_idle_ratio 0.75\n" in text
    figures.note(None, 1000, is_connected=False)
    text = _text(figures)
    assert "ravnest_provider_samples_total 10\n" in text
    assert "ravnest_provider_used_memory_bytes 0\n" in text
    assert "ravnest_provider_server_connected 0\n" in text
    assert "ravnest_provider_samples_per_second 5\n" not in text
    figures.note(_trained(7), 0, is_connected=True)
    text = _text(figures)
    assert "ravnest_provider_samples_total 17\n" in text
    assert "ravnest_provider_received_bytes_total 200\n" in text
    assert "ravnest_provider_assignments_total 2\n" in text


def test_the_page_serves_figures_at_one_path() -> None:
    figures = ProviderFigures()
    with metrics_page(
        Address("127.0.0.1", 0), lambda: provider_figures(OFFER, 1, figures.snapshot)
    ) as page:
        with urllib.request.urlopen(f"http://{page}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.read().decode() == _text(figures).replace(" 4000000\n", " 1\n")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{page}/", timeout=60)
        with pytest.raises(SettingsError, match="another port"), metrics_page(page, lambda: []):
            pass
