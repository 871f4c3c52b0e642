"""The progress of a job in words."""

from __future__ import annotations

from ravnest.schemas.jobs import JobProgress
from ravnest.telemetry import ScheduleRecord


def progress_text(progress: JobProgress) -> str:
    """Describe the progress of a job in a few words; empty before the first update or figure."""
    if not progress.updates and progress.validation is None:
        return ""
    parts = [f"epoch {progress.epoch}/{progress.epochs}"] if progress.epoch else []
    total = "" if progress.total_updates is None else f" of {progress.total_updates}"
    if progress.updates:
        parts.append(f"update {progress.updates}{total}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.diverged:
        parts.append("the loss is not finite")
    if progress.validation is not None:
        values = progress.metrics or {progress.metric: progress.validation}
        known = (f"{name} {value:.4f}" for name, value in values.items() if value is not None)
        parts.append(f"validation {', '.join(known)}")
    if progress.samples_per_second is not None:
        rate = progress.samples_per_second
        parts.append(f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s")
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    if progress.staleness:
        parts.append(f"staleness {progress.staleness}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def schedule_text(progress: JobProgress) -> str:
    """Describe the schedule of a job; empty before training begins."""
    return "" if progress.schedule is None else schedule_words(progress.schedule)


def schedule_words(chosen: ScheduleRecord) -> str:
    """Describe a schedule: its name, the micro-batches of a batch, and the reason."""
    count = "1 micro-batch" if chosen.microbatches == 1 else f"{chosen.microbatches} micro-batches"
    return f"schedule {chosen.schedule}, {count} per batch: {chosen.reason}"
