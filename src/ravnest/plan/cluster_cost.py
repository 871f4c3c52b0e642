"""Cost of several clusters: the samples that they need for a given loss, and what a user should know."""

from __future__ import annotations

COST_EXPONENT = 0.18
"""k clusters need k to this power times the samples of one process for the same loss: 1.13 times with 2
clusters, 1.28 times with 4. The worse of two measured tasks, with k times the learning rate, needs 1.10
and 1.28 times (docs/averaging.md)."""
_MEASURED = "by 65% with 2 and 368% with 4 clusters"
"""Validation loss of five small tasks above that of one process, at equal samples and learning rates."""


def samples_factor(clusters: int) -> float:
    """Return the samples that clusters need for a given loss, relative to those of one process."""
    return float(clusters**COST_EXPONENT)


def about_clusters(clusters: int) -> str:
    """Say what several clusters mean for learning, and what to do about it; empty for a single one."""
    if clusters == 1:
        return ""
    return (
        f"{clusters} clusters share the data: each makes about 1/{clusters} of the updates of one"
        " process per epoch, and schedules of the learning rate end where they would end there. At the"
        f" same learning rate the loss after the same samples is larger ({_MEASURED} in short"
        f" trainings): use about {clusters} times the learning rate of one process, or clusters=1."
    )
