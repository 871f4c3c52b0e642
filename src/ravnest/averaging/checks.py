"""Checks of what clusters say about their parameters, and of an average before it is applied. Pure.

A cluster may be damaged or lie. Its parameters enter an average only if they are about as large as those
of the others, its samples count only as far as the plan explains them, and an average that is not finite
or far too large is not applied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ravnest.types import ROBUST_CLUSTERS
from ravnest.wire.messages import Prepared, Start

LARGEST_RATIO = 10.0
"""Size of parameters or of an average, relative to the other clusters, above which it is wrong."""
SMALLEST_SCALE = 0.01
"""Scale below which sizes are not compared: biases that start at zero differ by any factor."""
MOST_SAMPLES = 2.0
"""Samples of a cluster that count, in terms of its planned share and the pace of the others."""
_ROUNDING = 1e-6
"""Relative error of weights that counts as rounding."""
_BLOCK = 32_000
"""Elements that are squared at once: they stay in the cache, and torch starts no further threads."""


def scale(vector: Tensor) -> float:
    """Return the root mean square of a vector; not finite if one of its values is not."""
    total = sum(float(block.double().square().sum()) for block in torch.split(vector, _BLOCK))
    return math.sqrt(total / vector.numel()) if vector.numel() and total >= 0 else total


def scales(vectors: Mapping[int, Tensor]) -> dict[int, float]:
    """Return the scale of the vector of each ring."""
    return {ring: scale(vector) for ring, vector in vectors.items()}


def usual_scales(replies: Iterable[Prepared]) -> dict[int, float]:
    """Return the lower median of the clusters' scales, by ring: one liar in three does not move it."""
    found: dict[int, list[float]] = {}
    for reply in replies:
        for ring, value in reply.scales.items():
            if math.isfinite(value) and value >= 0:
                found.setdefault(ring, []).append(value)
    return {ring: sorted(values)[(len(values) - 1) // 2] for ring, values in found.items()}


def outliers(replies: Mapping[int, Prepared]) -> dict[int, str]:
    """Return the clusters whose parameters are far larger than those of the others, with the reason."""
    usual = usual_scales(replies.values())
    found = {}
    for cluster, reply in replies.items():
        wrong = [ring for ring, value in reply.scales.items() if _is_wrong(value, usual.get(ring, 0.0))]
        if wrong:
            found[cluster] = (
                f"its parameters of ring {wrong[0]} have the scale {reply.scales[wrong[0]]:.3g}, those "
                f"of the other clusters {usual.get(wrong[0], 0.0):.3g}"
            )
    return found


def wrong_average(
    found: Mapping[int, float], own: Mapping[int, float], usual: Mapping[int, float]
) -> str:
    """Return why an average must not be applied; empty if it may be.

    All arguments are scales by ring: of the average, of the node's own copy, of most clusters. The last
    is what the coordinator says, and counts up to ``LARGEST_RATIO`` times the own scale, unless the own
    copy is damaged.
    """
    for ring, value in sorted(found.items()):
        if not math.isfinite(value):
            return f"the average of ring {ring} has NaN or Inf"
        mine, largest = own.get(ring, 0.0), usual.get(ring, 0.0)
        if math.isfinite(mine):
            largest = max(mine, min(largest, LARGEST_RATIO * max(mine, SMALLEST_SCALE)))
        if _is_wrong(value, largest):
            return f"the average of ring {ring} has the scale {value:.3g}, the parameters {largest:.3g}"
    return ""


def counted_samples(reported: Mapping[int, int], planned: Sequence[int]) -> dict[int, int]:
    """Return the samples by which clusters are weighted: as reported, but bounded by the plan.

    ``planned`` are the samples of each cluster in an epoch; empty: not known. Clusters finish an epoch
    at the same time, so that one that is far ahead of the others, in terms of its plan, does not count
    for more than ``MOST_SAMPLES`` times what they make likely.
    """
    counted = {cluster: max(0, count) for cluster, count in reported.items()}
    if any(not 0 <= cluster < len(planned) or planned[cluster] <= 0 for cluster in counted):
        return counted
    paces = sorted(count / planned[cluster] for cluster, count in counted.items() if count)
    if not paces:
        return counted
    most = MOST_SAMPLES * paces[(len(paces) - 1) // 2]
    return {
        cluster: min(count, math.ceil(most * planned[cluster])) for cluster, count in counted.items()
    }


def bounded_weights(weights: Mapping[int, float], planned: Sequence[int]) -> dict[int, float]:
    """Return weights of which none exceeds ``MOST_SAMPLES`` times the planned share of its cluster.

    Shares are those among the clusters with a weight. What exceeds a bound goes to the others, in
    proportion to their weights.
    """
    bounds = _weight_bounds(weights, planned)
    found, free = dict(weights), {c: weight for c, weight in weights.items() if c in bounds}
    while over := [cluster for cluster in free if found[cluster] > bounds[cluster]]:
        for cluster in over:
            found[cluster] = bounds[cluster]
            del free[cluster]
        left = 1 - sum(found[cluster] for cluster in bounds if cluster not in free)
        total = sum(free.values())
        found |= {cluster: left * weight / total for cluster, weight in free.items()}
    return found


def _weight_bounds(weights: Mapping[int, float], planned: Sequence[int]) -> dict[int, float]:
    """Return the largest weight of each cluster that contributes; empty if the plan is not known."""
    contributors = [cluster for cluster, weight in weights.items() if weight > 0]
    if any(not 0 <= cluster < len(planned) or planned[cluster] <= 0 for cluster in contributors):
        return {}
    total = sum(planned[cluster] for cluster in contributors)
    return {cluster: MOST_SAMPLES * planned[cluster] / total for cluster in contributors}


def start_refusal(
    head: Start, own: Prepared, *, assign: bool, planned: Sequence[int], robust: bool, live: int
) -> str:
    """Return why a Root does not take part in an average that the coordinator starts; empty if it does.

    ``own`` is what the Root's cluster has replied, ``live`` the number of clusters that this Root knows
    to be alive, its own included. ``assign``: training has paused for the round.
    """
    try:
        check_weights(head.weights)
    except ValueError as error:
        return str(error)
    if robust:
        count = sum(weight > 0 for weight in head.weights.values())
        if live < ROBUST_CLUSTERS or count >= ROBUST_CLUSTERS:
            return ""
        return (
            f"{count} clusters contribute, and {live} are alive: a robust mean takes the values of "
            f"{ROBUST_CLUSTERS} or more"
        )
    for cluster, bound in _weight_bounds(head.weights, planned).items():
        if head.weights[cluster] > bound * (1 + _ROUNDING):
            return (
                f"the weight {head.weights[cluster]:.3g} of cluster {cluster} is more than "
                f"{MOST_SAMPLES:g} times its planned share"
            )
    outlier = any(_is_wrong(value, head.scales.get(ring, 0.0)) for ring, value in own.scales.items())
    usable = own.samples > 0 and not (own.problem or own.behind or outlier)
    if usable and not assign and not head.weights[own.cluster]:
        return f"cluster {own.cluster} has no weight, although its parameters are valid"
    return ""


def check_weights(weights: Mapping[int, float]) -> None:
    """Raise ``ValueError`` unless the weights of clusters form an average."""
    if not all(0 <= weight <= 1 for weight in weights.values()):
        raise ValueError("the weights of the clusters must be from 0 to 1")
    if not math.isclose(sum(weights.values()), 1.0, rel_tol=_ROUNDING):
        raise ValueError(f"the weights of the clusters have the sum {sum(weights.values()):g}, not 1")


def _is_wrong(value: float, usual: float) -> bool:
    return not 0 <= value <= LARGEST_RATIO * max(usual, SMALLEST_SCALE)
