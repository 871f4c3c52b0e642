"""Measures what this machine can offer, within the limits of its owner."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from ravnest.errors import SettingsError
from ravnest.host import usable_cores
from ravnest.http.api import ApiClient
from ravnest.schemas.base import Schema
from ravnest.schemas.providers import LARGEST_RATE, ProviderOffer
from ravnest.version import __version__

GB = 1e9
_SHARE = 0.8
"""Share of the free memory that is offered; the rest is for the owner's other programs."""
PLANNED = 0.9
"""Share of a worker's memory that plans may use: their predictions are off by a few percent, and a
worker that takes more than its owner allows is ended."""
_SIZE = 512
_COMPUTE_SECONDS = 0.3
_PROBE_SECONDS = 0.25
"""A transfer of this duration is long enough to measure the rate."""
_PROBE_SIZES = (1 << 16, 1 << 19, 1 << 22)
_ROUND_TRIPS = 5
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class OwnerLimits:
    """Upper limits that the owner sets; ``None``: no limit but the machine's."""

    ram: float | None = None
    """GB."""
    cores: int | None = None

    def __post_init__(self) -> None:
        if self.ram is not None and not self.ram > 0:
            raise SettingsError(f"the RAM to offer must be more than 0 GB, not {self.ram:g}")
        if self.cores is not None and self.cores < 1:
            raise SettingsError(f"at least 1 core is needed, not {self.cores}")


class ProbeLoad(Schema):
    """Bytes that the server discards."""

    load: str


class BandwidthProbe(Protocol):
    """A server to which bytes can be sent and from which they can be fetched."""

    def fetch(self, size: int) -> None:
        """Fetch ``size`` bytes."""

    def send(self, size: int) -> None:
        """Send ``size`` bytes."""


@dataclass(frozen=True)
class ServerProbe:
    """Bandwidth probe that uses the server's API."""

    api: ApiClient

    def fetch(self, size: int) -> None:
        """Fetch ``size`` bytes."""
        with self.api.stream("/api/probe", params={"bytes": size}) as answer:
            for _ in answer.iter_bytes():
                pass

    def send(self, size: int) -> None:
        """Send ``size`` bytes."""
        self.api.post("/api/probe", ProbeLoad(load=secrets.token_hex(size // 2)), object)


def measure(
    name: str, addresses: Sequence[str], limits: OwnerLimits, probe: BandwidthProbe
) -> ProviderOffer:
    """Measure this machine, in about a second, and return the offer."""
    cores = cores_for(limits, usable_cores())
    trip = round_trip(probe)
    return ProviderOffer(
        name=name,
        address=addresses[0],
        addresses=tuple(addresses),
        ram=PLANNED * ram_for(limits, free_memory()) / GB,
        vram=_free_vram() / GB,
        cores=cores,
        compute=min(compute(cores), LARGEST_RATE),
        bandwidth=min(bandwidth(probe, trip), LARGEST_RATE),
        round_trip=trip,
        version=__version__,
        torch=torch.__version__,
    )


def ram_for(limits: OwnerLimits, free: int) -> float:
    """Return the bytes that a worker may take if ``free`` bytes are free."""
    share = _SHARE * free
    return share if limits.ram is None else min(share, limits.ram * GB)


def cores_for(limits: OwnerLimits, usable: int) -> int:
    """Return the number of cores to offer if ``usable`` cores are usable."""
    return usable if limits.cores is None else min(usable, limits.cores)


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes that are free, on the machine and in the container that this process runs in."""
    free: int = psutil.virtual_memory().available
    try:
        most = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(int(most) - used, 0)) if most.isdecimal() else free


def _free_vram() -> float:
    if not torch.cuda.is_available():
        return 0.0
    return float(sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))


def compute(cores: int, seconds: float = _COMPUTE_SECONDS) -> float:
    """Return the GFLOP/s of a matrix product on ``cores`` cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        matrix = torch.ones(_SIZE, _SIZE)
        torch.mm(matrix, matrix)  # the first product starts threads and allocates memory
        products, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or not products:
            torch.mm(matrix, matrix)
            products += 1
    finally:
        torch.set_num_threads(before)
    return products * 2 * _SIZE**3 / max(elapsed, 1e-9) / 1e9


def round_trip(probe: BandwidthProbe, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds to the server and back; the first request only opens the connection."""
    probe.fetch(1)
    return statistics.median(_took(probe.fetch, 1, clock) for _ in range(_ROUND_TRIPS))


def bandwidth(
    probe: BandwidthProbe, trip: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the Mbit/s of the slower direction."""
    return min(_rate(probe.fetch, trip, clock), _rate(probe.send, trip, clock))


def _rate(transfer: Callable[[int], None], trip: float, clock: Callable[[], float]) -> float:
    rate = 0.0
    for size in _PROBE_SIZES:
        took = _took(transfer, size, clock)
        rate = 8 * size / 1e6 / max(took - trip, took / 10, 1e-6)
        if took > _PROBE_SECONDS:
            break
    return rate


def _took(transfer: Callable[[int], None], size: int, clock: Callable[[], float]) -> float:
    begin = clock()
    transfer(size)
    return clock() - begin
