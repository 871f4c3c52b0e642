"""Estimate of a job for the providers of a server, without a submission."""

from __future__ import annotations

from ravnest.client.server_selection import select_server
from ravnest.deadlines import ESTIMATE
from ravnest.errors import JobError
from ravnest.http.api import ApiClient
from ravnest.http.retry import RetryPolicy
from ravnest.jobs.dataset_writer import StepProgress
from ravnest.jobs.estimate import pack_estimate
from ravnest.jobs.job import Job
from ravnest.schemas.estimates import JobEstimate

_TURN = RetryPolicy(tries=10, first=1.0)
"""Retries while the server makes the estimates of others."""


def estimate(
    job: Job,
    *,
    server: str | None = None,
    token: str | None = None,
    progress: StepProgress | None = None,
) -> JobEstimate:
    """Return whether a job fits the providers of a server, and what it takes; nothing is submitted.

    The server is chosen as by ``submit``. The model is captured and its costs are sent; weights and data
    stay here. Raises ``JobError`` or ``SplitError`` if the job cannot be trained as described.
    """
    if not isinstance(job, Job):
        raise JobError(f"estimate() takes a ravnest.Job, not a {type(job).__name__}")
    with select_server(server, token).api() as api:
        api.get("/api/health", object)  # capturing takes time: fail first if no server answers
        return request_estimate(api, job, progress)


def request_estimate(api: ApiClient, job: Job, progress: StepProgress | None = None) -> JobEstimate:
    """Capture the model of a job and ask a server for its estimate."""
    request = pack_estimate(job, progress)
    if progress is not None:
        progress("planning", 0, 1)
    return api.post("/api/estimates", request, JobEstimate, wait=ESTIMATE, retry=_TURN)
