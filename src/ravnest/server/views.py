"""What members see of providers and jobs."""

from __future__ import annotations

from ravnest.schemas.jobs import AssignmentView, JobProgress, JobView, LossHistory
from ravnest.schemas.providers import ProviderView
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import JobRecord, ProviderRecord
from ravnest.server.job_status import leading_root
from ravnest.server.liveness import Liveness


def provider_view(record: ProviderRecord, liveness: Liveness) -> ProviderView:
    """A provider, as members see it."""
    return ProviderView(
        id=record.id,
        offer=record.offer,
        state=record.state,
        reason=record.reason,
        job=record.job,
        seen=liveness.seen(record.id) or record.changed,
    )


def provider_views(books: Transaction, liveness: Liveness, lost_since: float) -> list[ProviderView]:
    """Those that are here, and those that were lost lately."""
    return [provider_view(record, liveness) for record in books.providers.present(lost_since)]


def job_view(books: Transaction, record: JobRecord) -> JobView:
    """A job, as its requester sees it."""
    parts = books.parts.of_job(record.id)
    root = leading_root(parts)
    progress = JobProgress(epochs=record.epochs)
    if root is not None:
        loss = books.parts.last_loss(root)
        progress = JobProgress(
            updates=root.losses,
            epochs=record.epochs,
            loss=loss,
            diverged=root.losses > 0 and loss is None,
            figure=root.figures[-1] if root.figures else None,
        )
    names = books.providers.names(part.provider for part in parts)
    return JobView(
        id=record.id,
        name=record.name,
        owner=record.owner,
        state=record.state,
        reason=record.reason,
        created=record.created,
        changed=record.changed,
        progress=progress,
        places=tuple(
            AssignmentView(
                provider=part.provider,
                provider_name=names.get(part.provider, part.provider),
                node=part.node,
                cluster=part.cluster,
                role=part.role,
                phase=part.phase,
            )
            for part in parts
        ),
        plan=record.plan,
    )


def job_losses(books: Transaction, job: str, first: int) -> LossHistory:
    """A job's losses from one update on."""
    root = leading_root(books.parts.of_job(job))
    if root is None:
        return LossHistory(first=first, losses=(), figures=())
    return LossHistory(first=first, losses=books.parts.losses(root.id, first), figures=root.figures)
