"""Decision at the Root: the checkpoint from which all stages of a cluster continue. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ravnest.types import BEGINNING, CheckpointId
from ravnest.wire.messages import HeldCheckpoint, ResumeFrom, ResumeOffer

Held = Mapping[int, tuple[HeldCheckpoint, ...]]


def merge_offers(own: ResumeOffer, following: ResumeOffer | None) -> ResumeOffer:
    """Return the offer of a node and all nodes behind it."""
    if following is None:
        return own
    held = dict(following.held)
    for stage, checkpoints in own.held.items():
        held[stage] = (*held.get(stage, ()), *checkpoints)
    return ResumeOffer(
        held,
        own.wanted or following.wanted,
        own.any_run or following.any_run,
        own.lost or following.lost,
        max(own.made, following.made),
    )


def choose_resume(offer: ResumeOffer, stages: int, new_run: str) -> ResumeFrom:
    """Return the newest checkpoint that every stage can load, of the run that the nodes want.

    Without a wanted run, or without any checkpoint of it, training begins at the beginning; a run that
    nodes of this cluster have left keeps its name. ``new_run`` names the attempt, and the run if it is a
    new one.
    """
    runs = {each.run for checkpoints in offer.held.values() for each in checkpoints}
    if offer.wanted:
        runs &= {offer.wanted}
    elif not offer.any_run:
        runs = set()
    candidates = [(*common, run) for run in runs if (common := _common(offer.held, run, stages))]
    if not candidates:
        return ResumeFrom(offer.wanted or new_run, BEGINNING, {}, attempt=new_run)
    checkpoint, taken, run = max(candidates)
    holders = [
        {
            each.holder
            for each in offer.held[stage]
            if (each.run, each.checkpoint, each.attempt) == (run, checkpoint, taken)
        }
        for stage in range(stages)
    ]
    return ResumeFrom(
        run,
        checkpoint,
        {stage: _nearest(stage, found) for stage, found in enumerate(holders) if stage not in found},
        taken=taken,
        attempt=new_run,
        alone=tuple(stage for stage, found in enumerate(holders) if found == {stage}),
    )


def _nearest(stage: int, holders: Iterable[int]) -> int:
    return min(holders, key=lambda holder: abs(holder - stage))


def _common(held: Held, run: str, stages: int) -> tuple[CheckpointId, str] | None:
    """Return the newest checkpoint of a run that is held for every stage, with its attempt.

    After the loss of a node, updates are made again; with late gradients their results differ. States
    of different attempts therefore do not belong together, though they have the same update.
    """
    found = [_ids(held.get(stage, ()), run) for stage in range(stages)]
    return max(set.intersection(*found), default=None)


def _ids(checkpoints: Iterable[HeldCheckpoint], run: str) -> set[tuple[CheckpointId, str]]:
    return {(each.checkpoint, each.attempt) for each in checkpoints if each.run == run}
