"""State of a stage between two updates: what a checkpoint stores, and how training continues from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ravnest.errors import StageFormatError
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.optimizer_state import FieldValue
from ravnest.store.checkpoint import OPTIMIZER, STATE, LazyTensor
from ravnest.store.checkpoint_state import stored_entries


@dataclass(frozen=True)
class StageState:
    """Tensors by their names in a checkpoint, and the optimizer's other state as plain values."""

    tensors: Mapping[str, torch.Tensor | LazyTensor]
    """Not copies: they change with the next computation."""
    updates: Mapping[str, Any]


def capture(execution: StageExecution) -> StageState:
    """Return the state of a stage after an update, before its next forward pass."""
    assert not execution.predicted, "predicted weights must not be stored"
    own = execution.module.state_tensors()
    tensors: dict[str, torch.Tensor | LazyTensor] = {
        STATE + entry.key: own[entry.key] for entry in stored_entries(execution.module.spec)
    }
    of_optimizer, updates = execution.updates.capture()
    tensors |= {OPTIMIZER + name: tensor for name, tensor in of_optimizer.items()}
    return StageState(tensors, updates)


def restore(
    execution: StageExecution,
    tensors: Iterable[tuple[str, torch.Tensor]],
    updates: Mapping[str, Any],
) -> None:
    """Continue from a checkpoint; ``StageFormatError`` if it is not one of this stage."""
    own = execution.module.state_tensors()
    missing = {entry.key for entry in stored_entries(execution.module.spec)}
    of_optimizer: dict[str, FieldValue] = {}
    with torch.no_grad():
        for name, tensor in tensors:
            if name.startswith(OPTIMIZER):
                field = name.removeprefix(OPTIMIZER)
                of_optimizer[field] = execution.updates.stored(
                    field, execution.to_device(tensor.clone())
                )
                continue
            key = name.removeprefix(STATE)
            if key not in missing or own[key].shape != tensor.shape or own[key].dtype != tensor.dtype:
                raise StageFormatError(f"the checkpoint has {key}, which does not fit this stage")
            own[key].copy_(tensor)
            missing.discard(key)
    if missing:
        raise StageFormatError(f"the checkpoint lacks {min(missing)}")
    execution.updates.restore(of_optimizer, updates)
