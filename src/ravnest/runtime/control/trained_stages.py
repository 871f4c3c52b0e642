"""Storage of trained stages: written at their own node and at the Root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ravnest.runtime.stage.execution import StageExecution
from ravnest.store.best_model import BestModelFolder
from ravnest.store.node_spec import NodeSpec
from ravnest.store.trained import receive_trained, save_trained, trained_manifest


@dataclass(frozen=True)
class TrainedStages:
    """Folder of trained stages; implements ``StageKeeper``."""

    folder: Path
    spec: NodeSpec
    execution: StageExecution
    changed_only: bool = False
    """Leave out frozen weights."""

    def save(self, run: str, *, best: bool) -> tuple[str, dict[str, torch.Tensor]]:
        """Write this node's stage and return its manifest and tensors for the Root.

        If a moving average of the weights is kept, it takes their place, and the result has both.

        ``best``: it is a stage of the best model so far, with frozen weights; only the Root writes it.
        """
        self.execution.write_replicas()
        module, average = self.execution.module, self.execution.updates.average
        averages = {} if average is None else average.tensors
        if best and self.spec.stage > 0:
            manifest = trained_manifest(self.spec, module, run)
            tensors = module.state_tensors() | averages
        else:
            manifest, tensors = save_trained(
                self._folder(best=best),
                self.spec,
                module,
                run,
                changed_only=self.changed_only and not best,
                averages=averages,
                raw=bool(averages) and not best,
            )
        return manifest, {k: t.detach().clone() for k, t in tensors.items()}

    def receive(
        self, node: int, manifest: str, tensors: Mapping[str, torch.Tensor], *, best: bool
    ) -> int:
        """Write another node's stage and return its stage number."""
        return receive_trained(self._folder(best=best), self.spec, node, manifest, tensors)

    def _folder(self, *, best: bool) -> Path:
        return BestModelFolder(self.folder, self.spec.cluster).incoming if best else self.folder
