"""``provide``: this machine works for the jobs of a server."""

from __future__ import annotations

import fcntl
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ravnest.errors import ServerError, SettingsError
from ravnest.http.credentials import Membership, find, home, joined
from ravnest.provider.addresses import addresses
from ravnest.provider.agent import Agent
from ravnest.provider.benchmark import GB, PLANNED, OwnerLimits, ServerProbe, measure
from ravnest.provider.job_dir import JobsDir, WorkerSettings
from ravnest.provider.runner import Provider
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.providers import ProviderOffer, ProviderView

_JOBS = "jobs"


def provide(  # noqa: PLR0913 - keywords, each an option of the command
    server: str,
    token: str | None = None,
    *,
    ram: float | None = None,
    cores: int | None = None,
    hours: float | None = None,
    folder: str | Path | None = None,
    name: str | None = None,
    listen: str | None = None,
    address: str | None = None,
    once: bool = False,
    say: Callable[[str], None] | None = None,
) -> int:
    """Offer this machine to a server and work for its jobs, until interrupted; the exit code.

    ``token`` is needed the first time only. ``ram`` (GB), ``cores`` and ``hours`` are the most that
    is given. ``name`` is that of this machine unless given; two providers on one machine need two.
    ``listen`` and ``address`` (``host:port``, ``host`` or ``:port``) say where the node listens and
    where others reach it. ``folder`` holds what jobs need while they run. ``once``: leave after one
    job. ``say`` gets a line for each event; stdout if None.
    """
    limits = OwnerLimits(ram, cores)
    if hours is not None and not hours > 0:
        raise SettingsError(f"the hours to offer must be more than 0, not {hours:g}")
    told = _say if say is None else say
    known_as = (name or socket.gethostname())[:100]
    target = home() / "providers" / _slug(known_as) if folder is None else Path(folder)
    with _alone(target, known_as), addresses(server, listen, address) as found:
        member = _member(server, token, known_as)
        with member.api() as api:
            offer = measure(known_as, found.known, limits, ServerProbe(api))
            provider = api.post("/api/providers", offer, ProviderView, idempotent=True)
            for line in describe(offer, limits, hours, member.url):
                told(line)
            workshop = JobsDir(target.absolute() / _JOBS)
            lost = list(workshop.places())
            for assignment in lost:
                workshop.discard(assignment)
            room = int(offer.ram / PLANNED * GB)
            ends = None if hours is None else time.monotonic() + 3600 * hours
            return Provider(
                api,
                offer,
                Agent(ends=ends, once=once, lost=lost),
                workshop,
                WorkerSettings(ram=room, cores=offer.cores, listen=found.listen),
                told,
                provider.id,
            ).run()


def describe(offer: ProviderOffer, limits: OwnerLimits, hours: float | None, url: str) -> list[str]:
    """The offer in a few plain lines."""
    capped = limits.ram is not None and offer.ram < 0.999 * PLANNED * limits.ram
    fewer = f" ({limits.ram:g} were asked for: no more is free)" if capped else ""
    vram = f" and {offer.vram:.1f} GB of VRAM" if offer.vram else ""
    until = "until Ctrl-C" if hours is None else f"for {hours:g} h, or until Ctrl-C"
    plural = "" if offer.cores == 1 else "s"
    return [
        f"{offer.name} offers {offer.ram:.2g} GB of RAM{fewer}{vram} and {offer.cores} core{plural} "
        f"({offer.compute:.0f} GFLOP/s)",
        f"to {url} ({offer.bandwidth:.0f} Mbit/s, {1000 * offer.round_trip:.1f} ms), {until}",
        f"other providers reach it at {offer.address}",
    ]


def _member(server: str, token: str | None, name: str) -> Membership:
    if token is not None:
        member = joined(server, token, name)
        if member.role not in (ApiRole.PROVIDER, ApiRole.ADMIN):
            raise ServerError(
                f"the token is for a {member.role}; make one with `ravnest token create --role provider`"
            )
        return member
    urls = [server] if "://" in server else [f"https://{server}", f"http://{server}"]
    known = next((m for url in urls if (m := find(url, (ApiRole.PROVIDER,), name)) is not None), None)
    if known is None:
        raise ServerError(
            f"{name} has not joined {server} yet: give --token, as `ravnest token create --role "
            "provider` prints it"
        )
    return known


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """The folder, for one provider only; the lock goes with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SettingsError(
                f"a provider named {name} runs here already; a second one needs another --name"
            ) from error
        yield


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name) or "provider"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
