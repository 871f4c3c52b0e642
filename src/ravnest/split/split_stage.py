"""A stage together with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ravnest.split.graph import StageSpec


@dataclass(frozen=True)
class SplitStage:
    """A stage and its weights, which share memory with the model."""

    spec: StageSpec
    tensors: Mapping[str, torch.Tensor]
