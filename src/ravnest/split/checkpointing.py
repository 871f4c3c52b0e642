"""Warn about checkpointing inside a model where stages behave differently.

Stages ignore checkpointing inside the model: the provider decides whether to recompute. Outputs and
gradients are the same. But torch runs a checkpointed block twice, so a batch norm in it updates its
statistics twice per step; a stage updates them once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint

from ravnest.split.source import line_of_stack

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def noted_checkpoints(model: nn.Module) -> Iterator[dict[str, None]]:
    """Yield the lines that checkpoint, as they are found; warn of batch norm in such a model.

    Replaces the function of torch that every non-reentrant checkpoint calls: torch has no hook for it.
    """
    lines: dict[str, None] = {}
    original = checkpoint._checkpoint_without_reentrant_generator

    def note(*args: Any, **kwargs: Any) -> Any:
        lines[line_of_stack()] = None
        return original(*args, **kwargs)

    checkpoint._checkpoint_without_reentrant_generator = note
    try:
        yield lines
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original
    if lines and any(_has_statistics(module) for module in model.modules()):
        logger.warning(
            "%s\ncheckpointing is not part of the stages, which recompute by themselves. If the "
            "checkpointed block has a batch norm, the unsplit model updates its statistics twice per "
            "step, the stages once, as without checkpointing",
            next(iter(lines)),
        )


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training and module.track_running_stats
