"""Checkpointing inside a model is not part of its stages, and in one case that shows.

Stages recompute as their provider wants, whatever the model asked for. Outputs and gradients are the
same. But torch runs a checkpointed block twice, and batch norm in it updates its statistics twice a
step; a stage updates them once.
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
def noted_checkpoints(model: nn.Module) -> Iterator[None]:
    """Warn after a training forward in which checkpointing may have met batch norm."""
    lines: dict[str, None] = {}
    original = checkpoint._checkpoint_without_reentrant_generator

    def note(*args: Any, **kwargs: Any) -> Any:
        lines[line_of_stack()] = None
        return original(*args, **kwargs)

    checkpoint._checkpoint_without_reentrant_generator = note
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original
    if lines and any(_counts(module) for module in model.modules()):
        logger.warning(
            "%s\ncheckpointing is left out of the stages, which recompute by themselves. If there is a "
            "batch norm in the checkpointed block, torch updates its statistics twice a step in the "
            "unsplit model, the stages once, as without checkpointing",
            next(iter(lines)),
        )


def _counts(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training and module.track_running_stats
