"""LoRA adapters of peft train as in one process, and load into peft."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from local_cluster import LocalCluster, form
from lora_cases import base_model, libraries, lora_model, sentences
from torch import nn
from torch.utils.data import DataLoader

from ravnest.jobs.adapter import adapter_of, read_adapter, save_adapter, write_adapter
from ravnest.store.trained import trained_tensors

EPOCHS = 4
RATE = 1e-2


def loaders() -> tuple[DataLoader, None]:
    return DataLoader(sentences(), 8), None


def train_alone(model: nn.Module) -> list[float]:
    """Train in one process, as peft's users do, and return the losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE)
    losses = []
    model.train()
    for _ in range(EPOCHS):
        for batch in loaders()[0]:
            labels = batch.pop("labels")
            loss = nn.functional.cross_entropy(model(**batch).logits, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_lora_trains_as_in_one_process_and_peft_loads_the_adapter(tmp_path: Path) -> None:
    _, peft = libraries()
    model = lora_model()
    alone = copy.deepcopy(model)
    expected = train_alone(alone)

    example = next(iter(loaders()[0]))
    del example["labels"]
    names = form(tmp_path, model, example, 2, optimizer=torch.optim.AdamW)
    local = LocalCluster(tmp_path, names, {"save_frozen": False})
    node = {
        "optimizer": torch.optim.AdamW,
        "optimizer_params": {"lr": RATE},
        "schedule": "sync",
        "micro_batches": 1,
    }
    local.train(loaders, node=node, epochs=EPOCHS, save=True)
    losses = [float(line) for line in (tmp_path / "losses.txt").read_text().split()]
    assert losses == [float(f"{loss:.9g}") for loss in expected]

    adapter = adapter_of(model)
    assert adapter is not None
    write_adapter(adapter, tmp_path / "adapter.json")
    trained = trained_tensors(tmp_path / "trained" / "cluster_0")
    path = save_adapter(read_adapter(tmp_path / "adapter.json"), trained, tmp_path / "adapter")
    assert all(tensor.any() for name, tensor in trained.items() if "lora_B" in name), "they were zeros"
    assert path.stat().st_size < 0.5 * sum(p.nbytes for p in model.parameters())
    loaded = peft.PeftModel.from_pretrained(base_model(), path.parent).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**example).logits, alone.eval()(**example).logits)


def test_a_model_that_trains_more_than_its_adapter_has_none() -> None:
    model = lora_model()
    assert adapter_of(nn.Linear(2, 2)) is None
    next(model.parameters()).requires_grad_(True)
    assert adapter_of(model) is None
