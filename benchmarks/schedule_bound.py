"""Least time between two batches that any schedule needs, for given times of stages and links."""

from __future__ import annotations

from collections.abc import Sequence

from ravnest.runtime.schedule.simulator import LinkCost, StageCost


def least_cycle(
    costs: Sequence[StageCost], links: Sequence[LinkCost], count: int, max_delay: int = 0
) -> float:
    """Return the seconds between two batches of ``count`` micro-batches that no schedule can undercut.

    Each stage computes for ``count`` micro-batches in a cycle. A batch starts at the Root after the
    update of the batch ``1 + max_delay`` before it, and its last gradient has to return: for each stage,
    the way of the first micro-batch to it, its work there and the way of the last gradient to the Root.
    The weight gradients of all stages but the Root are on none of these ways.
    """
    busy = max(count * cost.microbatch for cost in costs)
    ways = [_way(costs, links, count, stage) for stage in range(len(costs))]
    whole = _way(costs, links, 1, 0)
    transfers = [max(link.forward_busy, link.backward_busy) for link in links]
    ways += [whole + (count - 1) * transfer for transfer in transfers]
    return max(busy, max(ways) / (1 + max_delay), count * max(transfers, default=0.0))


def _way(costs: Sequence[StageCost], links: Sequence[LinkCost], count: int, stage: int) -> float:
    """Return the time from the first forward at the Root to its last gradient, if ``stage`` is slow."""
    root, own = costs[0], costs[stage]
    to_stage = sum(c.forward for c in costs[:stage]) + sum(link.forward for link in links[:stage])
    back = sum(c.backward for c in costs[1:stage]) + sum(link.backward for link in links[:stage])
    behind = sum(c.forward + c.backward for c in costs[stage + 1 :])
    behind += sum(link.forward + link.backward for link in links[stage:])
    gradients = own.backward + (own.weights if stage == 0 else 0.0)
    # All forwards come before the last gradient; no gradient comes before the first has returned.
    there = count * gradients + own.forward + max((count - 1) * own.forward, behind)
    return to_stage + there + back + (root.backward + root.weights if stage else 0.0)
