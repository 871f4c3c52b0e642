"""Check before upload whether a job's loss allows that batches are split into micro-batches.

The Leaf checks it again when training begins. A plan that knows it has the schedule, and reserves the
memory, with which the job trains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ravnest.jobs.dry_run import DryRun
from ravnest.plan.profile import ModelProfile
from ravnest.runtime.data import Criterion
from ravnest.split.loss_weighting import NotDecomposable, find_weighting

logger = logging.getLogger(__name__)

_LONGEST_REASON = 500
"""Characters; the message of an exception of the user's function may be long."""


def with_loss(profile: ModelProfile, criterion: Callable[..., Any], first_batch: DryRun) -> ModelProfile:
    """Return the profile with the smallest micro-batch that the loss allows, or why it allows none.

    The same profile if the model does not allow micro-batches either, or if the loss is like one of
    torch: a weighted mean or a sum of the losses of its parts.
    """
    if profile.smallest_rows is None:
        return profile
    found = find_weighting(
        Criterion(criterion), first_batch.output, first_batch.labels, profile.batch_size
    )
    if isinstance(found, NotDecomposable):
        reason = found.reason[:_LONGEST_REASON]
        logger.warning("batches are not split into micro-batches: %s", reason)
        return replace(profile, smallest_rows=None, unsplit_reason=reason)
    smallest = min(max(profile.smallest_rows, found.smallest), profile.batch_size)
    return profile if smallest == profile.smallest_rows else replace(profile, smallest_rows=smallest)


def split_like(profile: ModelProfile, other: ModelProfile) -> ModelProfile:
    """Return a profile whose batches are split as those of ``other``."""
    return replace(profile, smallest_rows=other.smallest_rows, unsplit_reason=other.unsplit_reason)
