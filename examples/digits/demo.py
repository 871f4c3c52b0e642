"""Split the digits CNN for three nodes, train the stages, fuse them, load and score the model.

All stages run in this process, joined as a network would join them.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from model import DigitsCNN, loaders
from torch.nn.functional import cross_entropy

from ravnest import clusterize, model_fusion, set_seed
from ravnest.split import Chain
from ravnest.store.bundle import load_module
from ravnest.store.nodefile import read_node
from ravnest.store.trained import save_trained

EPOCHS = 8


def train(chain: Chain, train_loader: torch.utils.data.DataLoader) -> None:
    optimizer = torch.optim.AdamW(chain.parameters(), lr=3e-3)
    for epoch in range(1, EPOCHS + 1):
        losses = []
        for images, labels in train_loader:
            loss = cross_entropy(chain(images), labels)
            optimizer.zero_grad()
            chain.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")


def accuracy(model: torch.nn.Module, loader: torch.utils.data.DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return torch.cat(hits).mean().item()


def main(folder: Path) -> None:
    set_seed(42)
    node_data = folder / "node_data"
    node_data.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("node_configs.json"), node_data)

    train_loader, val_loader = loaders()
    plan = clusterize(DigitsCNN(), (torch.rand(64, 1, 8, 8),), folder=node_data)

    nodes = [read_node(node_data, f"node_{stage.node.id}") for stage in plan.clusters[0].stages]
    modules = [load_module(node_data / node.bundle, node.sha256) for node in nodes]
    train(Chain(modules), train_loader)

    for node, module in zip(nodes, modules, strict=True):
        save_trained(folder / "trained", node, module, run="demo")
    fused = model_fusion(cluster_id=0, folder=folder / "trained")

    model = DigitsCNN()
    model.load_state_dict(torch.load(fused, weights_only=True))
    print(f"accuracy of the fused model: {accuracy(model, val_loader):.1%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
