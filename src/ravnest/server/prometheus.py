"""Figures of the server in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ravnest.schemas.jobs import JobState, JobView
from ravnest.schemas.providers import ProviderState, ProviderView
from ravnest.version import __version__

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """A value with the labels that tell it from the others of its name."""

    labels: Mapping[str, str]
    value: float


class Figure(NamedTuple):
    """A figure with all its samples. Counters only grow while the server has the job."""

    name: str
    kind: str
    help: str
    samples: Sequence[Sample]


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
    yield Figure(
        "ravnest_job_updates_total",
        "counter",
        "Updates that the leading cluster of a running job has made.",
        [Sample(_labels(job), job.progress.updates) for job in jobs],
    )
    yield _gauge("loss", "Loss of the last update.", jobs, (job.progress.loss for job in jobs))
    yield _gauge(
        "samples_per_second",
        "Training rate of the leading cluster.",
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


def exposition(found: Iterable[Figure]) -> str:
    """Return the figures as text."""
    lines = []
    for figure in found:
        lines += [
            f"# HELP {figure.name} {figure.help}",
            f"# TYPE {figure.name} {figure.kind}",
            *(f"{figure.name}{_shown(sample.labels)} {sample.value:.17g}" for sample in figure.samples),
        ]
    return "\n".join([*lines, ""])


def _shown(labels: Mapping[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
