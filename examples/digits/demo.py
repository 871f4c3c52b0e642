"""Split the digits CNN, train it with one provider per node, fuse it and measure its accuracy.

    python demo.py      three nodes in one cluster
    python demo.py 2    five nodes in two clusters, each with half of the data

The providers are processes on this machine that communicate over gRPC.
"""

import re
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from model import DigitsCNN, loaders

from ravnest import clusterize, model_fusion, set_seed
from ravnest.provider.launch import launch

HERE = Path(__file__).parent
NODES = {1: "node_configs.json", 2: "node_configs_2_clusters.json"}


def node_configs(clusters: int) -> str:
    """Return the example's node configurations with free ports of this machine."""
    with ExitStack() as held:  # all ports at once, so that none is used twice

        def free_port(_: re.Match[str]) -> str:
            taken = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            return f"127.0.0.1:{taken.getsockname()[1]}"

        return re.sub(r"127\.0\.0\.1:\d+", free_port, (HERE / NODES[clusters]).read_text())


def accuracy(state: dict[str, torch.Tensor]) -> float:
    """Return the accuracy of the model with these weights on the validation data."""
    model = DigitsCNN()
    model.load_state_dict(state)
    model.eval()
    _, val_loader = loaders()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == labels).float() for images, labels in val_loader]
    return torch.cat(hits).mean().item()


def main(folder: Path, clusters: int) -> None:
    """Run all steps in ``folder``."""
    set_seed(42)
    node_data = folder / "node_data"
    node_data.mkdir()
    (node_data / "node_configs.json").write_text(node_configs(clusters))
    clusterize(model=DigitsCNN(), example_args=(torch.rand(64, 1, 8, 8),), folder=node_data)

    print("\nEach provider runs `python provider.py node_<i>`:")
    failed = launch(HERE / "provider.py", folder=node_data, work=folder)
    if failed:
        sys.exit(failed)

    fused = [
        torch.load(model_fusion(cluster_id=cluster, folder=folder / "trained"), weights_only=True)
        for cluster in range(clusters)
    ]
    if clusters > 1:
        same = all(torch.equal(fused[0][key], other[key]) for other in fused[1:] for key in fused[0])
        print("\nthe clusters have", "identical models" if same else "DIFFERENT models")
    print(f"\naccuracy of the fused model: {accuracy(fused[0]):.1%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch), clusters=int(sys.argv[1]) if sys.argv[1:] else 1)
