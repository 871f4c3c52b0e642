"""Training with tensors that are cut along their rows equals a single process within rounding."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, form
from many_clusters import Clusters, raise_errors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import TiedGPT, token_loss, train_alone
from workloads import GPT, free_ports

from ravnest import clusterize, set_seed
from ravnest.errors import SettingsError

VOCABULARY = 4096
RAM = 0.002
"""GB. With AdamW, the embedding alone needs 2.1 MB, and the output layer as much."""
EXAMPLE = (torch.randint(0, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(0)),)
ADAMW = {
    "optimizer": torch.optim.AdamW,
    # The true gradient of a key's bias is 0: with a smaller eps, AdamW makes large steps of its noise.
    "optimizer_params": {"lr": 1e-2, "eps": 1e-4},
}
EPOCHS = 2


def make_model(tied: bool) -> nn.Module:
    set_seed(7)
    return TiedGPT(VOCABULARY, 32, 2, 4) if tied else GPT(VOCABULARY, 32, 2, 4, heads=2)


def loaders(batches: int = 4) -> tuple[DataLoader, DataLoader]:
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2 * batches, 4), generator=made)
    tokens[0] = torch.tensor([0, VOCABULARY // 2 - 1, VOCABULARY // 2, VOCABULARY - 1])
    data = TensorDataset(tokens, tokens.flip(1))
    return DataLoader(data, 2), DataLoader(data, 2)


def blocks_by_stage(folder: Path, names: list[str]) -> list[list[str]]:
    """Return the blocks of rows that each stage holds."""
    found = []
    for name in names:
        path = next((folder / "node_data").glob(f"cluster_*/{name}/stage.json"))
        state = json.loads(path.read_text())["state"]
        found.append([entry["key"] for entry in state if "rows" in entry])
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("settings", [{}, {"clip_grad_norm": 0.05}, {"schedule": "async"}], ids=str)
def test_row_blocks_train_like_a_single_process(
    tmp_path: Path, tied: bool, settings: dict[str, Any]
) -> None:
    model = make_model(tied)
    names = form(tmp_path, copy.deepcopy(model), EXAMPLE, 4, RAM, optimizer=torch.optim.AdamW)
    held = blocks_by_stage(tmp_path, names)
    assert sum(map(bool, held)) >= 3, "the blocks are in several stages"
    cluster = LocalCluster(tmp_path, names)
    outcomes = cluster.train(
        loaders, node={**ADAMW, "criterion": token_loss, **settings}, epochs=EPOCHS, save=True
    )
    fused = cluster.fused()
    trained = copy.deepcopy(model)
    trained.load_state_dict(fused, strict=True)
    assert list(fused) == list(model.state_dict())
    assert fused._metadata == model.state_dict()._metadata
    if tied:
        assert torch.equal(fused["embed.weight"], fused["head.weight"])
    if settings.get("schedule") == "async":
        return
    losses = train_alone(
        model,
        loaders()[0],
        token_loss,
        torch.optim.AdamW(model.parameters(), **ADAMW["optimizer_params"]),
        epochs=EPOCHS,
        clip=settings.get("clip_grad_norm"),
    )
    written = [float(line) for line in (tmp_path / "losses.txt").read_text().split()]
    assert written == pytest.approx(losses, abs=1e-5)
    for name, expected in model.state_dict().items():
        assert torch.allclose(fused[name], expected, atol=2e-5), name
    model.eval()
    with torch.no_grad():
        measured = [float(token_loss(model(batch[0]), batch)) for batch in loaders()[1]]
    assert outcomes[names[0]].result == pytest.approx(sum(measured) / len(measured), abs=1e-5)


def test_two_clusters_average_their_row_blocks(tmp_path: Path) -> None:
    node_data = tmp_path / "node_data"
    node_data.mkdir()
    configs = {
        str(i): {"IP": f"127.0.0.1:{port}", "benchmarks": {"ram": ram, "bandwidth": 1000}}
        for i, (port, ram) in enumerate(zip(free_ports(6), [0.003] * 6, strict=True))
    }
    (node_data / "node_configs.json").write_text(json.dumps(configs))
    set_seed(42)
    plan = clusterize(make_model(tied=True), example_args=EXAMPLE, clusters=2, folder=node_data)
    assert [cut.name for cut in plan.row_cuts] == ["embed.weight"]
    names = [[f"node_{s.node.id}" for s in cluster.stages] for cluster in plan.clusters]
    every = [name for cluster in names for name in cluster]
    options = {**ADAMW, "criterion": token_loss, "reduce_factor": 2}
    clusters = Clusters(LocalCluster(tmp_path, every, options), names)
    raise_errors(clusters.train(lambda _: loaders(), epochs=1, save=True))
    first, second = clusters.fused(0), clusters.fused(1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["embed.weight"], first["head.weight"])
    assert not torch.equal(first["embed.weight"], make_model(tied=True).embed.weight)


def test_optimizers_that_read_whole_tensors_are_refused(tmp_path: Path) -> None:
    names = form(tmp_path, make_model(tied=True), EXAMPLE, 4, RAM, optimizer=torch.optim.AdamW)
    holder = names[[bool(blocks) for blocks in blocks_by_stage(tmp_path, names)].index(True)]
    cluster = LocalCluster(tmp_path, names, {"optimizer": torch.optim.Adafactor})
    with pytest.raises(SettingsError, match=r"cuts embed.weight along its rows, and Adafactor"):
        cluster.node(holder).start()


def test_optimizer_settings_see_the_names_of_the_model(tmp_path: Path) -> None:
    names = form(tmp_path, make_model(tied=True), EXAMPLE, 4, RAM, optimizer=torch.optim.AdamW)
    seen: set[str] = set()

    def settings(named: list[tuple[str, nn.Parameter]]) -> tuple[list[nn.Parameter], dict[str, float]]:
        seen.update(name for name, _ in named)
        return [parameter for _, parameter in named], {"lr": 1e-3}

    node = {"optimizer": torch.optim.AdamW, "optimizer_params": settings, "criterion": token_loss}
    LocalCluster(tmp_path, names).train(lambda: (loaders(1)[0], None), node=node, epochs=1)
    assert "embed.weight" in seen
    assert not any("rows_" in name for name in seen)


def test_a_stage_takes_its_rows_from_a_given_model(tmp_path: Path) -> None:
    names = form(tmp_path, make_model(tied=True), EXAMPLE, 4, RAM, optimizer=torch.optim.AdamW)
    other = TiedGPT(VOCABULARY, 32, 2, 4)
    for name, keys in zip(names, blocks_by_stage(tmp_path, names), strict=True):
        module = LocalCluster(tmp_path, names).node(name, model=other)._load_stage()
        entries = {entry.key: entry for entry in module.spec.state}
        for key in keys:
            rows = entries[key].rows
            expected = other.embed.weight[rows.first : rows.stop]
            assert torch.equal(module.state_tensors()[key], expected)
