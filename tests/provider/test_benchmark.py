"""Measurements with a virtual clock, and the limits of the owner."""

from pathlib import Path

import pytest
import torch

from ravnest.errors import SettingsError
from ravnest.host import usable_cores
from ravnest.provider.benchmark import (
    OwnerLimits,
    bandwidth,
    compute,
    cores_for,
    free_memory,
    measure,
    ram_for,
    round_trip,
)


class Wire:
    """A simulated connection to a server, with its own clock."""

    def __init__(self, trip: float, down: float, up: float) -> None:
        """Rates in Mbit/s."""
        self.now = 0.0
        self.trip, self.down, self.up = trip, down, up
        self.sizes: list[int] = []

    def clock(self) -> float:
        return self.now

    def fetch(self, size: int) -> None:
        self.sizes.append(size)
        self.now += self.trip + 8e-6 * size / self.down

    def send(self, size: int) -> None:
        self.sizes.append(size)
        self.now += self.trip + 8e-6 * size / self.up


@pytest.mark.parametrize(("down", "up"), [(100.0, 20.0), (5.0, 900.0), (0.5, 0.5), (8000.0, 8000.0)])
def test_the_slower_direction_is_the_bandwidth(down: float, up: float) -> None:
    wire = Wire(0.02, down, up)
    assert bandwidth(wire, 0.02, wire.clock) == pytest.approx(min(down, up), rel=0.1)


def test_a_slow_connection_is_measured_with_little_data() -> None:
    wire = Wire(0.02, 1.0, 1.0)
    bandwidth(wire, 0.02, wire.clock)
    assert wire.now < 5
    assert len(wire.sizes) == 2


def test_the_round_trip_excludes_opening_the_connection() -> None:
    wire = Wire(0.02, 1000.0, 1000.0)
    assert round_trip(wire, wire.clock) == pytest.approx(0.02, rel=0.01)
    assert len(wire.sizes) == 6


@pytest.mark.parametrize(
    ("limit", "free", "offered"), [(None, 10, 8.0), (4.0, 10, 4.0), (9.0, 10, 8.0), (0.5, 1, 0.5)]
)
def test_offered_ram_is_a_share_of_the_free_memory_within_the_limit(
    limit: float | None, free: int, offered: float
) -> None:
    assert ram_for(OwnerLimits(ram=limit), free * 10**9) == pytest.approx(offered * 1e9)


@pytest.mark.parametrize(("limit", "cores"), [(None, 4), (1, 1), (9, 4)])
def test_offered_cores_stay_within_the_limit(limit: int | None, cores: int) -> None:
    assert cores_for(OwnerLimits(cores=limit), 4) == cores


@pytest.mark.parametrize("limits", [{"ram": 0}, {"ram": -1}, {"ram": float("nan")}, {"cores": 0}])
def test_invalid_limits_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        OwnerLimits(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "expected"), [("3000000", 1_000_000), ("1000000", 0)])
def test_the_limit_of_a_container_counts(tmp_path: Path, most: str, expected: int) -> None:
    (tmp_path / "memory.max").write_text(most + "\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    assert free_memory(tmp_path) == expected


def test_without_a_container_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    assert free_memory(tmp_path) > 10**8
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    assert free_memory(tmp_path) > 10**8


def test_the_compute_measurement_restores_the_thread_count() -> None:
    before = torch.get_num_threads()
    assert compute(1, seconds=0.0) > 0.1
    assert torch.get_num_threads() == before


def test_an_offer_holds_all_measurements() -> None:
    offer = measure("attic", ["127.0.0.1:20000"], OwnerLimits(0.25, 1), Wire(0.001, 100.0, 100.0))
    assert (offer.name, offer.address, offer.cores) == ("attic", "127.0.0.1:20000", 1)
    assert offer.ram == pytest.approx(0.9 * 0.25)
    assert offer.torch == torch.__version__
    assert usable_cores() >= 1
