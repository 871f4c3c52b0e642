"""What this machine can offer: measured, and within the limits of its owner."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from ravnest.errors import SettingsError
from ravnest.http.api import ApiClient
from ravnest.schemas.base import Schema
from ravnest.schemas.providers import ProviderOffer
from ravnest.version import __version__

GB = 1e9
_SHARE = 0.8
"""Of the memory that is free: the owner of the machine has programs of their own."""
PLANNED = 0.9
"""Of the memory that a worker may take, what plans may count on: what they predict is a few hundredths
off, and a worker that takes more than its owner allowed is ended."""
_SIZE = 512
_COMPUTE_SECONDS = 0.3
_PROBE_SECONDS = 0.25
"""A transfer that takes so long tells enough."""
_PROBE_SIZES = (1 << 16, 1 << 19, 1 << 22)
_TRIPS = 5
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class OwnerLimits:
    """The most that the owner wants to give; None: what the machine has."""

    ram: float | None = None
    """GB."""
    cores: int | None = None

    def __post_init__(self) -> None:
        if self.ram is not None and not self.ram > 0:
            raise SettingsError(f"the RAM to offer must be more than 0 GB, not {self.ram:g}")
        if self.cores is not None and self.cores < 1:
            raise SettingsError(f"at least 1 core is needed, not {self.cores}")


class Load(Schema):
    """Bytes that the server throws away."""

    load: str


class MachineProbe(Protocol):
    """A server that bytes can be sent to and fetched from."""

    def fetch(self, size: int) -> None:
        """Fetch so many bytes."""

    def send(self, size: int) -> None:
        """Send so many bytes."""


@dataclass(frozen=True)
class ServerProbe:
    """Implements ``MachineProbe``."""

    api: ApiClient

    def fetch(self, size: int) -> None:
        """Fetch so many bytes."""
        with self.api.stream("/api/probe", params={"bytes": size}) as answer:
            for _ in answer.iter_bytes():
                pass

    def send(self, size: int) -> None:
        """Send so many bytes."""
        self.api.post("/api/probe", Load(load=secrets.token_hex(size // 2)), object)


def measure(name: str, address: str, limits: OwnerLimits, probe: MachineProbe) -> ProviderOffer:
    """The machine as others will plan with it; takes about a second."""
    cores = cores_for(limits, usable_cores())
    trip = round_trip(probe)
    return ProviderOffer(
        name=name,
        address=address,
        ram=PLANNED * ram_for(limits, free_memory()) / GB,
        vram=_free_vram() / GB,
        cores=cores,
        compute=compute(cores),
        bandwidth=bandwidth(probe, trip),
        round_trip=trip,
        version=__version__,
        torch=torch.__version__,
    )


def ram_for(limits: OwnerLimits, free: int) -> float:
    """Bytes that a worker may take of those that are free."""
    share = _SHARE * free
    return share if limits.ram is None else min(share, limits.ram * GB)


def cores_for(limits: OwnerLimits, usable: int) -> int:
    """Cores to offer of those that are usable."""
    return usable if limits.cores is None else min(usable, limits.cores)


def usable_cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that a new process could have: of the machine, and of the container it runs in."""
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
    """GFLOP/s of a matrix product on so many cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        matrix = torch.ones(_SIZE, _SIZE)
        torch.mm(matrix, matrix)  # the first one starts threads and reserves memory
        products, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or not products:
            torch.mm(matrix, matrix)
            products += 1
    finally:
        torch.set_num_threads(before)
    return products * 2 * _SIZE**3 / max(elapsed, 1e-9) / 1e9


def round_trip(probe: MachineProbe, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to the server and back; the first question only opens the connection."""
    probe.fetch(1)
    return statistics.median(_took(probe.fetch, 1, clock) for _ in range(_TRIPS))


def bandwidth(probe: MachineProbe, trip: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Mbit/s of the slower direction."""
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
