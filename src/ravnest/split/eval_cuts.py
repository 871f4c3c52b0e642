"""Cut the evaluation graph to match the cuts of the training graph.

The two graphs can differ (stochastic depth, auxiliary heads), so positions do not carry over. The cuts
put each operation into a stage that holds its parameters; among such cuts they minimise the bytes
that cross.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import fx

from ravnest.split.casts import is_state_cast
from ravnest.split.cuts import CutLayout
from ravnest.split.measure import Measurement
from ravnest.split.state import ModelState

_MISPLACED = 1e6
"""Cost of replicating a parameter in a second stage, relative to sending as many bytes over a cut."""


def follow_training(
    layout: CutLayout,
    measurement: Measurement,
    state: ModelState,
    stages_of: Mapping[str, set[int]],
    count: int,
) -> tuple[int, ...]:
    """Return the cuts of the evaluation graph, given the stages that hold each state key in training.

    Uses an exact dynamic program over the legal cuts; a stage may be empty.
    """
    end = len(layout.operations)
    cuts = np.array([0, *layout.legal, end])
    crossing = crossing_bytes(layout, measurement)[cuts]
    misplaced = [_misplaced(layout, state, stages_of, stage)[cuts] for stage in range(count)]
    best = np.full(len(cuts), np.inf)
    best[0] = 0.0
    choices: list[np.ndarray] = []
    for stage in range(count):
        gain = best - misplaced[stage]
        smallest = np.minimum.accumulate(gain)
        is_new = np.r_[True, gain[1:] < smallest[:-1]]
        choices.append(np.maximum.accumulate(np.where(is_new, np.arange(len(cuts)), 0)))
        best = smallest + misplaced[stage] + crossing
    chosen = [len(cuts) - 1]
    for stage in reversed(range(count)):
        chosen.append(int(choices[stage][chosen[-1]]))
    return tuple(int(cuts[index]) for index in reversed(chosen[1:-1]))


def crossing_bytes(layout: CutLayout, measurement: Measurement) -> np.ndarray:
    """Return the bytes that cross each cut in forward; the first and last are the model's own edges."""
    steps = np.zeros(len(layout.operations) + 2)
    for node, (first, last) in layout.spans.items():
        size = measurement.value_bytes.get(node, 0)
        steps[first] += size
        steps[last + 1] -= size
    return np.cumsum(steps)[:-1]


def _misplaced(
    layout: CutLayout, state: ModelState, stages_of: Mapping[str, set[int]], stage: int
) -> np.ndarray:
    """Return, for each cut, the cost of putting all operations before it into ``stage``."""
    cost = np.zeros(len(layout.operations) + 1)
    for position, keys in enumerate(state_keys(layout)):
        for key in keys:
            if key in stages_of and stage not in stages_of[key]:
                tensor = state.tensors[key].tensor
                cost[position + 1] += _MISPLACED * (1 + tensor.numel() * tensor.element_size())
    return np.cumsum(cost)


def state_keys(layout: CutLayout) -> Sequence[list[str]]:
    """Return the state keys that each operation reads, directly or through a cast."""
    names = layout.capture.state_of
    return [
        [names[name] for name in dict.fromkeys(_sources(operation)) if name in names]
        for operation in layout.operations
    ]


def _sources(operation: fx.Node) -> Iterator[str]:
    for node in operation.all_input_nodes:
        yield node.all_input_nodes[0].name if is_state_cast(node) else node.name
