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
    )


def choose_resume(offer: ResumeOffer, stages: int, new_run: str) -> ResumeFrom:
    """Return the newest checkpoint that every stage can load, of the run that the nodes want.

    Without a wanted run, or without any checkpoint of it, training begins at the beginning; a run that
    nodes of this cluster have left keeps its name.
    """
    runs = {each.run for checkpoints in offer.held.values() for each in checkpoints}
    if offer.wanted:
        runs &= {offer.wanted}
    elif not offer.any_run:
        runs = set()
    candidates = [(common, run) for run in sorted(runs) if (common := _common(offer.held, run, stages))]
    if not candidates:
        return ResumeFrom(offer.wanted or new_run, BEGINNING, {})
    checkpoint, run = max(candidates)
    return ResumeFrom(run, checkpoint, _sources(offer.held, run, checkpoint, stages))


def _common(held: Held, run: str, stages: int) -> CheckpointId | None:
    """Return the newest checkpoint of a run that is held for every stage."""
    found = [_ids(held.get(stage, ()), run) for stage in range(stages)]
    return max(set.intersection(*found), default=None)


def _ids(checkpoints: Iterable[HeldCheckpoint], run: str) -> set[CheckpointId]:
    return {each.checkpoint for each in checkpoints if each.run == run}


def _sources(held: Held, run: str, checkpoint: CheckpointId, stages: int) -> dict[int, int]:
    """Return the stages whose own node lacks a checkpoint, and the nearest stage that has it."""
    sources: dict[int, int] = {}
    for stage in range(stages):
        holders = [
            each.holder
            for each in held.get(stage, ())
            if (each.run, each.checkpoint) == (run, checkpoint)
        ]
        nearest = min(holders, key=lambda holder: abs(holder - stage))
        if nearest != stage:
            sources[stage] = nearest
    return sources
