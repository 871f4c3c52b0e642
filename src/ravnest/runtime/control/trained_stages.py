"""Storage of trained stages: written at their own node and at the Root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ravnest.runtime.stage.execution import StageExecution
from ravnest.store.node_spec import NodeSpec
from ravnest.store.trained import receive_trained, save_trained


@dataclass(frozen=True)
class TrainedStages:
    """Folder of trained stages; implements ``StageKeeper``."""

    folder: Path
    spec: NodeSpec
    execution: StageExecution

    def save(self, run: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Write this node's stage and return its manifest and tensors for the Root."""
        self.execution.write_replicas()
        module = self.execution.module
        manifest = save_trained(self.folder, self.spec, module, run)
        return manifest, {k: t.detach().clone() for k, t in module.state_tensors().items()}

    def receive(self, node: int, manifest: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write another node's stage and return its stage number."""
        return receive_trained(self.folder, self.spec, node, manifest, tensors)
