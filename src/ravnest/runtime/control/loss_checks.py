"""Checks of the loss at the Leaf before training: splits of batches, and logits in chunks."""

from __future__ import annotations

import logging

from ravnest.errors import StageInputError
from ravnest.runtime.control.runtime_config import RuntimeConfig
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.leaf import Leaf, start_chunks
from ravnest.store.node_spec import NodeSpec
from ravnest.wire.messages import LossSplit

logger = logging.getLogger(__name__)

_LOSS_ROWS = 6
"""Samples with which the Leaf checks whether the loss allows to split a batch."""


def loss_split(config: RuntimeConfig, execution: StageExecution, leaf: Leaf) -> LossSplit:
    """Find out at the Leaf whether batches can be split without a change of the loss."""
    if not config.may_split:
        return LossSplit(False, config.spec.split_reason)
    try:
        return leaf.find_weighting(execution.passes.example_output, _LOSS_ROWS)
    except (StageInputError, RuntimeError, IndexError, ValueError) as error:
        return LossSplit(False, f"the loss cannot be checked: {error}")


def chunk_loss(spec: NodeSpec, execution: StageExecution, leaf: Leaf) -> None:
    """Compute logits and loss in chunks if the plan wants that; warn if it is not possible.

    The Root starts no batch before it has the Leaf's answer about the loss.
    """
    reason = "" if spec.loss_chunks == 1 else start_chunks(execution, leaf, spec.loss_chunks)
    if reason:
        logger.warning(
            "node_%d: the plan counts on logits and loss in %d chunks, but they are computed as a "
            "whole: %s. The node needs more memory than planned; if it runs out of it, use smaller "
            "batches or a node with more RAM",
            spec.node,
            spec.loss_chunks,
            reason,
        )
