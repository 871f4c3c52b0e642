"""The estimate of a job as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from ravnest.client.progress_text import duration
from ravnest.plan.memory import size
from ravnest.schemas.estimates import ClusterEstimate, JobEstimate, StageEstimate

_SHOWN_PROVIDERS = 20


def estimate_lines(found: JobEstimate) -> Iterator[str]:
    """Yield the lines: whether the job fits, what is missing or what it takes, and the plan."""
    if not found.fits:
        yield f"does not fit: {found.reason}"
        yield from _missing(found)
        yield from _providers(found)
        return
    yield "fits, and can start now" if found.starts_now else f"fits, but not now: {found.reason}"
    updates = f"{found.updates} updates in {found.epochs} {_counted(found.epochs, 'epoch')}, schedule "
    work = updates + found.schedule if found.epochs else "evaluation without training"
    yield f"{work}, about {found.samples_per_second:,.4g} samples/s"
    yield (
        f"about {duration(found.training_seconds)} of {'training' if found.epochs else 'work'}, after "
        f"{duration(found.start_seconds)} in which the providers fetch weights and data"
    )
    yield f"upload {size(found.upload_bytes)} at most, download {size(found.result_bytes)} at the end"
    for cluster in found.clusters:
        yield from _cluster(cluster)
    yield ""
    yield found.plan.rstrip()


def _missing(found: JobEstimate) -> Iterator[str]:
    needed, offered = found.needed_bytes, found.offered_bytes
    if needed is not None and offered is not None and needed > offered:
        yield f"missing: {size(needed - offered)} ({size(needed)} needed, {size(offered)} offered)"


def _providers(found: JobEstimate) -> Iterator[str]:
    """Yield the memory of each provider, so that the reader sees which one is too small."""
    if not found.providers:
        yield "no provider is connected: start one with `ravnest provide --server URL --token TOKEN`"
    for each in found.providers[:_SHOWN_PROVIDERS]:
        at_work = "" if each.idle else ", at work"
        yield f"  {each.name} offers {size(each.ram_bytes)}{at_work}"
    if len(found.providers) > _SHOWN_PROVIDERS:
        yield f"  and {len(found.providers) - _SHOWN_PROVIDERS} more"


def _cluster(cluster: ClusterEstimate) -> Iterator[str]:
    yield (
        f"cluster {cluster.cluster}: {cluster.samples} samples and {cluster.updates} updates, about "
        f"{cluster.samples_per_second:,.4g} samples/s"
    )
    for stage in cluster.stages:
        yield _stage(stage)


def _stage(stage: StageEstimate) -> str:
    return (
        f"  {stage.role} on {stage.provider}: {size(stage.memory_bytes)} of {size(stage.ram_bytes)} RAM,"
        f" fetches {size(stage.download_bytes)}, sends {size(stage.sent_bytes)} during training"
    )


def _counted(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
