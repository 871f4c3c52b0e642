"""Subset of a model's cuts for the search: enough to rank clusters, few enough to try many.

``cuts`` then chooses the final cut points among all cuts of the model.
"""

from __future__ import annotations

import numpy as np

from ravnest.plan.cost import ModelCosts
from ravnest.plan.memory import FloatArray
from ravnest.plan.ranges import IntArray


def candidate_cuts(costs: ModelCosts, count: int) -> IntArray:
    """Return at most ``count`` cuts, ascending, including the model's ends; all cuts if there are few.

    The model is divided into pieces of about equal work, memory and units. From each piece the cut with
    the least traffic is taken.
    """
    if costs.units + 1 <= count:
        return np.arange(costs.units + 1)
    inner = np.arange(1, costs.units)
    piece = np.floor(_progress(costs)[1:-1] * (count - 2)).astype(np.int64)
    piece = np.minimum(piece, count - 3)
    order = np.lexsort((inner, costs.link_bytes[1:-1], piece))
    _, first = np.unique(piece[order], return_index=True)
    return np.concatenate(([0], np.sort(inner[order][first]), [costs.units]))


def _progress(costs: ModelCosts) -> FloatArray:
    """Return the position of each cut in the model, from 0 to 1: the mean of several measures."""
    measures = (
        costs.work.prefix,
        costs.state.uses.prefix,
        costs.activations.prefix,
        np.arange(costs.units + 1, dtype=np.float64),
    )
    shares = [prefix / prefix[-1] for prefix in measures if prefix[-1] > 0]
    return np.asarray(np.mean(shares, axis=0))
