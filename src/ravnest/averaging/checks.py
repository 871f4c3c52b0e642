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

from ravnest.wire.messages import Prepared

LARGEST_RATIO = 10.0
"""Size of parameters or of an average, relative to the other clusters, above which it is wrong."""
SMALLEST_SCALE = 0.01
"""Scale below which sizes are not compared: biases that start at zero differ by any factor."""
MOST_SAMPLES = 2.0
"""Samples of a cluster that count, in terms of its planned share and the pace of the others."""
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

    All arguments are scales by ring: of the average, of the node's own copy, of most clusters.
    """
    for ring, value in sorted(found.items()):
        if not math.isfinite(value):
            return f"the average of ring {ring} has NaN or Inf"
        mine = own.get(ring, 0.0)
        largest = max(mine if math.isfinite(mine) else 0.0, usual.get(ring, 0.0))
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


def check_weights(weights: Mapping[int, float]) -> None:
    """Raise ``ValueError`` unless the weights of clusters form an average."""
    if not all(0 <= weight <= 1 for weight in weights.values()):
        raise ValueError("the weights of the clusters must be from 0 to 1")
    if not math.isclose(sum(weights.values()), 1.0, rel_tol=1e-6):
        raise ValueError(f"the weights of the clusters have the sum {sum(weights.values()):g}, not 1")


def _is_wrong(value: float, usual: float) -> bool:
    return not 0 <= value <= LARGEST_RATIO * max(usual, SMALLEST_SCALE)
