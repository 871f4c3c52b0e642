"""State of a stage that training changes, in terms of the model: the contents of a checkpoint."""

from __future__ import annotations

from ravnest.split.graph import StageSpec, StateSpec
from ravnest.store.checkpoint import StoredTensor


def stored_entries(spec: StageSpec) -> list[StateSpec]:
    """Return the state that training changes here: owned weights that train, and buffers.

    Weights that an earlier stage owns arrive with the first micro-batch.
    """
    return [
        entry
        for entry in spec.state
        if entry.kind == "buffer"
        or (entry.kind == "parameter" and entry.trainable and entry.stages[0] == spec.index)
    ]


def stored_tensors(spec: StageSpec) -> dict[str, StoredTensor]:
    """Return the weights and buffers of a stage's checkpoint in terms of the model, by key."""
    stored = {}
    for entry in stored_entries(spec):
        rows = entry.rows
        first, count = (0, None) if rows is None else (rows.first, rows.stop - rows.first)
        stored[entry.key] = StoredTensor(entry.model_names[0], first, count)
    return stored
