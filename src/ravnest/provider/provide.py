"""``provide``: this machine trains for the jobs of a server."""

from __future__ import annotations

import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from ravnest.errors import SettingsError
from ravnest.host import make_private, working_kernels
from ravnest.http.credentials import home
from ravnest.logs.metrics_page import metrics_page
from ravnest.provider.addresses import MOST_ADDRESSES, Addresses, addresses
from ravnest.provider.agent import Agent
from ravnest.provider.benchmark import GB, PLANNED, OwnerLimits, ServerProbe, measure
from ravnest.provider.download import SPARE
from ravnest.provider.figures import ProviderFigures, provider_figures
from ravnest.provider.interfaces import local_host
from ravnest.provider.job_dir import DEFAULT_DISK, DEFAULT_SECONDS, JobsDir, WorkerSettings
from ravnest.provider.membership import machine_membership
from ravnest.provider.outcome import Outcome
from ravnest.provider.port_mapping import mapped_port
from ravnest.provider.routes import RouteFinder
from ravnest.provider.runner import Provider
from ravnest.provider.sandbox.choice import Sandbox, SandboxChoice, choose_sandbox
from ravnest.provider.speed_check import SpeedCheck
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.providers import ProviderOffer, ProviderView, SandboxKind
from ravnest.types import Address

_JOBS = "jobs"
_LOW_DISK = 10 * GB
"""Disk space for jobs below which the owner is warned, unless ``disk`` is lower."""


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
    address: str | Sequence[str] | None = None,
    map_port: bool = False,
    once: bool = False,
    sandbox: SandboxChoice = "auto",
    disk: float | None = None,
    job_hours: float | None = None,
    say: Callable[[str], None] | None = None,
    progress: Callable[[str], None] | None = None,
    metrics: Address | None = None,
) -> None:
    """Offer this machine to a server and train for its jobs, until it is interrupted.

    ``token`` is needed the first time only. ``ram`` (GB), ``cores`` and ``hours`` are upper limits.
    ``name`` is the machine's by default; two providers on one machine need two names. ``listen`` and
    ``address`` (``host:port``, ``host`` or ``:port``) say where the node listens and where others
    reach it; ``listen`` can have a range of ports (``:20000-20010``), ``address`` can be a list.
    ``map_port``: ask the router to forward the port (UPnP). ``folder`` holds the files of a job while
    it runs. ``once``: leave after one job. ``sandbox``: ``bwrap`` (bubblewrap, with Landlock and seccomp
    inside), ``landlock`` (without bubblewrap), ``auto`` (the first of them that works) or ``off``.
    ``disk`` (GB) and ``job_hours`` limit the files and the time of one job. ``say`` is called with a
    line for each event; stdout by default. ``progress`` is called about once per second with a line
    that says what the provider does: updates, samples per second, bytes, and its share of idle time.
    ``metrics``: address at which Prometheus reads the provider's figures, without a credential.

    Returns once the provider has left the server. Raises ``ServerError`` if the server cannot be
    reached at the start or refuses the provider, ``SettingsError`` if an argument is wrong,
    ``JobEndedError`` if ``once`` is set and the job fails, and ``KeyboardInterrupt`` if it is
    interrupted a second time while it leaves.
    """
    limits = OwnerLimits(ram, cores)
    for what, value in (("hours to offer", hours), ("disk space", disk), ("hours of a job", job_hours)):
        if value is not None and not value > 0:
            raise SettingsError(f"the {what} must be more than 0, not {value:g}")
    chosen = choose_sandbox(sandbox)
    working_kernels()  # tried once per process, which takes seconds: now, not when a job begins
    show = _say if say is None else say
    own_name = (name or socket.gethostname())[:100]
    target = home() / "providers" / _slug(own_name) if folder is None else Path(folder)
    announced = [address] if isinstance(address, str) else list(address or ())
    with ExitStack() as stack:
        stack.enter_context(_locked(target / "lock", f"a provider named {own_name} uses {target}"))
        low_disk = describe_disk(shutil.disk_usage(target).free, disk, target)
        found = stack.enter_context(addresses(server, listen, announced))
        if map_port:
            found = stack.enter_context(_mapped(found, server, show))
        member = machine_membership(server, token, own_name, ApiRole.PROVIDER)
        # Two processes with one credential would take each other's assignments, whatever their folders.
        running = f"a provider named {own_name} already works for {member.url}"
        stack.enter_context(_locked(home() / "providers" / f"{_slug(member.id)}.lock", running))
        with member.api() as api:
            routes = RouteFinder(api, found)
            jobs_dir = JobsDir(target.absolute() / _JOBS)
            begun, kept = earlier_work(jobs_dir, member.id)
            measured = measure(own_name, found.known, limits, ServerProbe(api))
            offer = routes.complete(measured).having_trained(kept).in_sandbox(sandbox_kind(chosen))
            provider = api.post("/api/providers", offer, ProviderView, idempotent=True)
            lines = describe(offer, limits, hours, member.url)
            for line in (*lines, describe_routes(provider), describe_sandbox(chosen), low_disk):
                if line is not None:
                    show(line)
            room = int(offer.ram / PLANNED * GB)
            ends = None if hours is None else time.monotonic() + 3600 * hours
            figures = ProviderFigures()
            if metrics is not None:
                about = partial(provider_figures, offer, room)
                page = stack.enter_context(metrics_page(metrics, lambda: about(figures.snapshot)))
                show(f"Prometheus reads its figures at http://{page}/metrics")
            Provider(
                api,
                offer,
                Agent(
                    ends=ends,
                    once=once,
                    begun=begun,
                    kept=kept,
                    speed=SpeedCheck(offer.compute, time.monotonic()),
                ),
                jobs_dir,
                WorkerSettings(
                    ram=room,
                    cores=offer.cores,
                    listen=found.listen,
                    disk=DEFAULT_DISK if disk is None else int(disk * GB),
                    seconds=DEFAULT_SECONDS if job_hours is None else 3600 * job_hours,
                ),
                show,
                provider.id,
                chosen,
                routes.complete,
                progress or _ignore,
                figures,
            ).run()


@contextmanager
def _mapped(found: Addresses, server: str, say: Callable[[str], None]) -> Iterator[Addresses]:
    """Add the public address of a port at the router, which leads here while the block runs."""
    with mapped_port(Address(local_host(server), found.port), say) as mapping:
        say(mapping.reason)
        public = () if mapping.address is None else (str(mapping.address),)
        yield replace(found, known=tuple(dict.fromkeys((*public, *found.known)))[:MOST_ADDRESSES])


def earlier_work(jobs_dir: JobsDir, provider: str) -> tuple[list[str], dict[str, Outcome]]:
    """Return the assignments that an earlier process worked on: those to continue, and the results."""
    kept = jobs_dir.outcomes(provider)
    others = (name for name in jobs_dir.assignments() if name not in kept)
    return [name for name in others if not jobs_dir.job_dir(name).has_outcome], kept


def describe(offer: ProviderOffer, limits: OwnerLimits, hours: float | None, url: str) -> list[str]:
    """Return the offer as a few lines for the owner."""
    capped = limits.ram is not None and offer.ram < 0.999 * PLANNED * limits.ram
    fewer = f" ({limits.ram:g} GB were requested, but less is free)" if capped else ""
    vram = f" and {offer.vram:.1f} GB of VRAM" if offer.vram else ""
    until = "until Ctrl-C" if hours is None else f"for {hours:g} h, or until Ctrl-C"
    plural = "" if offer.cores == 1 else "s"
    return [
        f"{offer.name} offers {offer.ram:.2g} GB of RAM{fewer}{vram} and {offer.cores} core{plural} "
        f"({offer.compute:.0f} GFLOP/s)",
        f"to {url} ({offer.bandwidth:.0f} Mbit/s, {1000 * offer.round_trip:.1f} ms), {until}",
    ]


def describe_routes(provider: ProviderView) -> str:
    """Return a line that says if and where other providers reach this one."""
    if provider.reachability == "direct":
        return f"other providers reach it at {provider.offer.address}"
    return f"{provider.reachability}: {provider.reachability_reason}"


def sandbox_kind(sandbox: Sandbox | None) -> SandboxKind:
    """Return the name of a sandbox in an offer."""
    return "off" if sandbox is None else sandbox.kind


def describe_sandbox(sandbox: Sandbox | None) -> str:
    """Return a line that says what confines the jobs of others."""
    if sandbox is None:
        return "no sandbox: jobs run with all permissions of this user"
    return f"jobs run in a sandbox ({sandbox})"


def describe_disk(free: int, wanted: float | None, folder: Path) -> str | None:
    """Return a warning if there is little disk space for the files of jobs; ``None`` if there is enough.

    ``wanted``: GB that the owner allows for a job. Raise ``SettingsError`` if no job would fit.
    """
    usable = free - SPARE
    advice = "free some space, or give another --folder"
    if usable <= 0:
        raise SettingsError(
            f"{folder} has {free / GB:.2f} GB of free disk space, of which {SPARE / GB:.1f} GB are not "
            f"used, so that no job fits: {advice}"
        )
    if usable >= (_LOW_DISK if wanted is None else wanted * GB):
        return None
    return (
        f"little disk space: the files of a job can take {usable / GB:.2f} GB in {folder}, and jobs "
        f"that need more will fail here: {advice}"
    )


@contextmanager
def _locked(path: Path, held: str) -> Iterator[None]:
    """Hold a lock file while the block runs; the system releases it if the process ends.

    ``held``: sentence for the error if another process has it.
    """
    make_private(path.parent)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise SettingsError(f"{held}: stop it, or give this one another --name") from error
    try:
        yield
    finally:
        lock.release()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name) or "provider"


def _ignore(_line: str) -> None:
    pass


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
