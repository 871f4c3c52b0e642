"""Takeover of vacant places: which idle provider takes the place of a node that lost its own. Pure.

The vacant places of a cluster are filled together or not at all: a pipeline with a gap cannot train, and
a provider that waits for the last place could train for another job meanwhile. Only a provider that had
its place before takes it again at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ravnest.plan.memory import size
from ravnest.schemas.providers import StageNeeds

MOST_REFILLS = 3
"""Number of times that a place is filled without a new checkpoint before the cluster is given up."""


@dataclass(frozen=True)
class VacantPlace:
    """Place of a node that has no provider."""

    node: int
    name: str
    """Name of the place in messages."""
    needs: StageNeeds
    tls: bool
    """True if the nodes of its job talk over TLS."""
    holder: str
    """Provider that had it last."""
    cause: str
    """Why that one lost it, a ``FailureCause``; empty if its node must repeat the end."""
    reason: str
    """The same as a sentence."""
    refills: int = 0
    """Number of times that it was filled since the newest checkpoint."""
    neighbours: frozenset[str] = frozenset()
    """Providers of its neighbours in the pipeline."""
    has_peers: bool = True
    """True if it talks to other nodes at all."""
    taken: frozenset[str] = frozenset()
    """Addresses of the other nodes of its job."""
    refused: frozenset[str] = frozenset()
    """Providers that say that the job fails there; they cannot confirm it."""


@dataclass(frozen=True)
class SpareProvider:
    """Idle provider that can take a place."""

    id: str
    name: str
    ram: float
    """Bytes."""
    compute: float
    """GFLOP/s."""
    bandwidth: float
    """Mbit/s."""
    addresses: frozenset[str]
    is_loopback: bool
    """True if its first address is one of loopback."""
    is_reachable: bool = True
    """True if other providers reach it."""
    cut_off: frozenset[str] = frozenset()
    """Providers to which it cannot connect."""


@dataclass(frozen=True)
class NoSpare:
    """Reason why vacant places are not filled now."""

    reason: str


def fill(
    places: Iterable[VacantPlace], spares: Iterable[SpareProvider]
) -> dict[int, SpareProvider] | NoSpare:
    """Return a spare for each vacant place of a cluster, by node, or why there are not enough.

    Places that need the most RAM choose first: every spare that fits them fits the others too. The
    provider that had a place before is preferred, since it may still have its files and checkpoints,
    unless its machine was the cause, or it was lost before; then it is the last choice.
    """
    free = list(spares)
    chosen: dict[int, SpareProvider] = {}
    for place in sorted(places, key=lambda each: (-each.needs.ram, each.node)):
        problems = {each.id: misfit(place, each) for each in free}
        fitting = [each for each in free if not problems[each.id]]
        if not fitting:
            return NoSpare(_shortage(place, [problems[each.id] for each in free]))
        best = min(fitting, key=lambda each: (*_preference(place, each), each.id))
        chosen[place.node] = best
        free = [each for each in free if each.id != best.id and not each.addresses & best.addresses]
    return chosen


def returning(
    places: Iterable[VacantPlace], spares: Iterable[SpareProvider]
) -> dict[int, SpareProvider]:
    """Return the places that idle providers take again, by node: they have the state of their stages.

    They do not wait for the other places of the cluster to be filled, because their checkpoints are
    needed either way: to train on, or to plan the job anew.
    """
    free = {each.id: each for each in spares}
    return {
        place.node: free[place.holder]
        for place in places
        if not _is_failing(place) and place.holder in free and not misfit(place, free[place.holder])
    }


def misfit(place: VacantPlace, spare: SpareProvider) -> str:
    """Return why a provider cannot take a place; empty if it can."""
    if spare.id in place.refused:
        return f"{spare.name} says that the job fails there"
    if spare.ram < place.needs.ram:
        return f"{spare.name} has {size(spare.ram)}"
    if not place.tls and not spare.is_loopback:
        return f"{spare.name} is on another machine, and the nodes of this job talk without TLS"
    if spare.addresses & place.taken:
        return f"{spare.name} has the address of another node"
    if place.has_peers and not spare.is_reachable:
        return f"others cannot reach {spare.name}"
    if place.neighbours & spare.cut_off:
        return f"{spare.name} cannot connect to a neighbour"
    return ""


def predicted_rate(needs: StageNeeds, spare: SpareProvider) -> float:
    """Return the batches per second of a stage at a provider, by its slower part; 0: not known."""
    seconds = max(needs.work / spare.compute, needs.traffic / spare.bandwidth)
    return 1 / seconds if seconds else 0.0


def exhausted(place: VacantPlace) -> str:
    """Return why a place is not filled again; empty if it may be."""
    if place.refills < MOST_REFILLS:
        return ""
    return f"{place.reason}; the place was filled {place.refills} times without a new checkpoint"


def _preference(place: VacantPlace, spare: SpareProvider) -> tuple[int, float, float]:
    """Return the sort key of a spare that fits, smallest first."""
    again = 2 if _is_failing(place) else 0
    return again if spare.id == place.holder else 1, -predicted_rate(place.needs, spare), -spare.compute


def _is_failing(place: VacantPlace) -> bool:
    """Return whether another provider should have the place, rather than the one that had it last.

    A provider that is lost again and again would use up all refills, whatever it gives as the cause.
    """
    is_lost_again = place.cause != "" and place.refills >= MOST_REFILLS - 1
    return place.cause == "machine" or is_lost_again


def _shortage(place: VacantPlace, problems: Sequence[str]) -> str:
    amount = f" with at least {size(place.needs.ram)}" if place.needs.ram else ""
    why = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
    return f"no idle provider{amount} can take the place of {place.name}" + (f": {why}" if why else "")
