"""A choice of cuts for the search: enough to rank clusters, few enough to try many.

The final cut points always come from all cuts of the model; see ``cuts``.
"""

from __future__ import annotations

import numpy as np

from ravnest.plan.cost import ModelCosts
from ravnest.plan.memory import FloatArray
from ravnest.plan.ranges import IntArray


def chosen_cuts(costs: ModelCosts, count: int) -> IntArray:
    """At most ``count`` cuts, ascending, with the model's ends; all of them where they fit.

    The model is divided into pieces of about equal work, memory and units, and of each piece the
    cut with the least traffic stays.
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
    """How far each cut lies in the model, from 0 to 1: the mean over several measures."""
    measures = (
        costs.work.prefix,
        costs.state.uses.prefix,
        costs.activations.prefix,
        np.arange(costs.units + 1, dtype=np.float64),
    )
    shares = [prefix / prefix[-1] for prefix in measures if prefix[-1] > 0]
    return np.asarray(np.mean(shares, axis=0))
