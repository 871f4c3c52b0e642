"""Checkpoints of any cut of a model, made from one state of the whole model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ravnest.plan.profiler import profile_model
from ravnest.plan.row_cuts import row_cut_models
from ravnest.split import PreparedModel, prepare
from ravnest.split.graph import StageSpec, StateSpec
from ravnest.store.checkpoint import OPTIMIZER, STATE, CheckpointFolder, CheckpointManifest
from ravnest.store.checkpoint_sets import StageCheckpoint
from ravnest.store.checkpoint_state import stored_entries, stored_tensors
from ravnest.store.plain_data import encode
from ravnest.types import CheckpointId

RANDOM = {"torch": b"\x01\x02", "python": (3, (1, 2), None), "loaders": [b"\x05"]}
ROOT = {"epoch": 1, "batches": 4, "microbatches": 8, "samples": 32, "data": "ab", "random": RANDOM}
RECENT = '[{"kind": "loss"}]'
GROUPS = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": (0.9, 0.99)}]
SCHEDULER = {"last_epoch": 7, "best": float("nan"), "milestones": {4: 1}}

CHECKPOINT = CheckpointId(12, 2)


class RowsAndNorms(nn.Module):
    """Tied embedding, batch norm, a buffer of several stages, a frozen layer, parameters of any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Linear(6, 16)
        self.narrow = nn.Linear(16, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(self.embed(tokens)))) * self.scale
        hidden = torch.tanh(self.frozen(torch.tanh(hidden))) * self.gain
        return self.head(self.narrow(torch.relu(self.wide(hidden))) * self.scale)


def prepared_variants(counts: Sequence[int]) -> list[PreparedModel]:
    """Return the model with whole tensors, and with tensors cut into blocks of rows."""
    torch.manual_seed(0)
    whole = prepare(RowsAndNorms(), (torch.randint(0, 12, (4,)),))
    cut = row_cut_models(whole, profile_model(whole), counts=counts)
    return [whole, *(model.prepared for model in cut)]


@dataclass(frozen=True)
class WholeState:
    """State of the whole model: tensors by name, and the optimizer's tensors by name and field."""

    tensors: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]
    run: str = "run"
    id: CheckpointId = CHECKPOINT
    cluster: int = 0
    updates: Mapping[str, Any] = field(
        default_factory=lambda: {
            "groups": GROUPS,
            "scheduler": SCHEDULER,
            "scheduler_steps": 12,
            "scheduler_due": 0.25,
            "epoch_steps": 4.5,
        }
    )

    @classmethod
    def at_random(cls, model: PreparedModel, seed: int) -> WholeState:
        generator = torch.Generator().manual_seed(seed)
        tensors, optimizer = {}, {}
        for key, entry in model.capture.state.tensors.items():
            tensor = torch.rand(entry.tensor.shape, generator=generator)
            tensors[key] = tensor = (tensor * 100).to(entry.tensor.dtype)
            optimizer[key] = {
                "exp_avg": torch.rand(tensor.shape, generator=generator),
                "step": torch.tensor(12.0),
            }
        return cls(tensors, optimizer)

    def checkpoint(
        self, folder: Path, spec: StageSpec, plan: str = "old", node: int = 0, **changed: Any
    ) -> StageCheckpoint:
        """Write the checkpoint that a stage would write; ``changed`` replaces settings of updates."""
        tensors, of_optimizer, fields = {}, {}, {}
        for entry in stored_entries(spec):
            name = next(name for name in entry.model_names if name in self.tensors)
            tensors[STATE + entry.key] = _rows(entry, self.tensors[name])
            if entry.kind == "parameter":
                fields[entry.key] = {"mu": len(name)}
                for each, tensor in sorted(self.optimizer[name].items()):
                    rows = _rows(entry, tensor) if tensor.dim() else tensor
                    of_optimizer[f"{OPTIMIZER}{entry.key}/{each}"] = rows
        updates: dict[str, Any] = {"done": self.id.update, "scheduler_steps": 0}
        if fields:
            updates |= {**self.updates, "fields": fields}
        last = spec.index == spec.count - 1
        progress = {
            "root": ROOT if spec.index == 0 else None,
            "leaf": RANDOM if last and spec.index > 0 else None,
            "validations": {1: ("accuracy", 0.5, 7)},
            "updates": updates | changed,
            "averaging_samples": 24,
            "recent": RECENT if spec.index == 0 else None,
        }
        manifest = CheckpointManifest(
            plan,
            self.run,
            node,
            self.cluster,
            spec.index,
            spec.count,
            self.id,
            stored_tensors(spec),
            encode(progress),
            attempt="attempt",
        )
        own = CheckpointFolder(folder)
        complete = own.commit(own.write_tensors(self.id, tensors | of_optimizer), manifest)
        return StageCheckpoint(complete, own.tensors_path(self.id))


def random_stages(model: PreparedModel, choice: random.Random) -> list[StageSpec]:
    """Cut a model at random places."""
    count = choice.randint(0, min(5, len(model.cuts)))
    cuts = sorted(choice.sample(range(len(model.cuts)), count))
    return [stage.spec for stage in model.cut([model.cuts[cut] for cut in cuts]).stages]


def _rows(entry: StateSpec, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if entry.rows is None else tensor[entry.rows.first : entry.rows.stop]
