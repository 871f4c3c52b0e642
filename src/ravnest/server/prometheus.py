"""Figures of the server in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ravnest.logs.prometheus import Figure, Sample
from ravnest.schemas.jobs import JobState, JobView
from ravnest.schemas.providers import ProviderState, ProviderView
from ravnest.version import __version__


def figures(jobs: Sequence[JobView], providers: Sequence[ProviderView]) -> Iterator[Figure]:
    """Yield the figures of the jobs and providers that a member may see."""
    yield Figure(
        "ravnest_info", "gauge", "Version of the server.", [Sample({"version": __version__}, 1)]
    )
    states = Counter(job.state for job in jobs)
    yield Figure(
        "ravnest_jobs",
        "gauge",
        "Jobs by state, of the newest 500.",
        [Sample({"state": state}, states[state]) for state in JobState],
    )
    kinds = Counter(provider.state for provider in providers)
    yield Figure(
        "ravnest_providers",
        "gauge",
        "Providers by state.",
        [Sample({"state": state}, kinds[state]) for state in ProviderState],
    )
    yield from _of_providers([each for each in providers if each.state is not ProviderState.LOST])
    yield from _of_jobs([job for job in jobs if not job.state.is_final])


def _of_providers(providers: Sequence[ProviderView]) -> Iterator[Figure]:
    offered = sum(each.offer.ram for each in providers)
    busy = sum(each.offer.ram for each in providers if each.state is not ProviderState.OFFERED)
    yield Figure(
        "ravnest_offered_memory_bytes",
        "gauge",
        "Memory that connected providers offer, by whether a job uses them.",
        [Sample({"used": "yes"}, 1e9 * busy), Sample({"used": "no"}, 1e9 * (offered - busy))],
    )


def _of_jobs(jobs: Sequence[JobView]) -> Iterator[Figure]:
    yield _gauge(
        "updates",
        "Updates that the model of a running job has; fewer after the loss of a node.",
        jobs,
        (job.progress.updates for job in jobs),
    )
    yield _gauge("loss", "Loss of the last update.", jobs, (job.progress.loss for job in jobs))
    yield _gauge(
        "samples_per_second",
        "Training rate of all clusters together.",
        jobs,
        (job.progress.samples_per_second for job in jobs),
    )
    yield _gauge(
        "seconds_left", "Predicted time to the end.", jobs, (job.progress.seconds_left for job in jobs)
    )
    yield _gauge(
        "staleness", "Updates by which gradients were late.", jobs, (j.progress.staleness for j in jobs)
    )
    yield Figure(
        "ravnest_job_recoveries_total",
        "counter",
        "Times that training continued after the loss of a node.",
        [Sample(_labels(job), job.recoveries) for job in jobs],
    )


def _gauge(name: str, text: str, jobs: Sequence[JobView], values: Iterable[float | None]) -> Figure:
    samples = [Sample(_labels(j), v) for j, v in zip(jobs, values, strict=True) if v is not None]
    return Figure(f"ravnest_job_{name}", "gauge", text, samples)


def _labels(job: JobView) -> dict[str, str]:
    return {"job": job.id, "name": job.name}
