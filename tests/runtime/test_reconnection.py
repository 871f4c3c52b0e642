"""Training over connections that are reset: nodes connect again, and the result stays the same."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from local_cluster import Splits
from provider_processes import Provider, Start, ended_well
from resetting_proxy import resetting
from workloads import free_ports

from ravnest import model_fusion
from ravnest.store.node_spec import read_node
from ravnest.types import Address

RESETS = 20


def _trained(folder: Path) -> dict[str, torch.Tensor]:
    fused = model_fusion(cluster_id=0, folder=folder / "trained")
    return dict(torch.load(fused, weights_only=True))


@pytest.mark.parametrize("case", [pytest.param("mlp", marks=pytest.mark.full), "tied-gpt"])
def test_twenty_resets_do_not_change_a_bit(
    tmp_path: Path, splits: Splits, start: Start, case: str
) -> None:
    source, names = splits(case, 3)
    weights = []
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        shutil.copytree(source / "node_data", folder / "node_data")
        settings = {
            "case": case,
            "schedule": "sync",
            "micro_batches": 2,
            "epochs": 20,
            "evaluate": False,
        }
        providers: dict[str, Provider] = {}
        if disturbed:
            ports = free_ports(len(names))
            announced = [Address.parse(read_node(folder / "node_data", n).address).port for n in names]
            drawn = random.Random(case)
            limits = [drawn.randint(2_000, 20_000) for _ in range(RESETS)]
            with resetting(list(zip(announced, ports, strict=True)), limits) as resets:
                for name, port in zip(names, ports, strict=True):
                    providers |= start(folder, [name], **settings, listen=f"127.0.0.1:{port}")
                ended_well(providers)
                assert not resets.left
            assert "is connected to node_" in providers[names[0]].output
        else:
            ended_well(start(folder, names, **settings))
        weights.append(_trained(folder))
    alone, reset = weights
    assert list(alone) == list(reset)
    assert all(torch.equal(alone[name], reset[name]) for name in alone)
