"""Split the digits CNN for three nodes, train it with three providers, fuse it, load and score it.

The providers are processes of their own on this machine, and talk to each other over gRPC.
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


def node_configs() -> str:
    """The example's node_configs.json, with ports that are free on this machine."""
    with ExitStack() as held:  # all at once, so that no port is given twice

        def free_port(_: re.Match[str]) -> str:
            taken = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            return f"127.0.0.1:{taken.getsockname()[1]}"

        return re.sub(r"127\.0\.0\.1:\d+", free_port, (HERE / "node_configs.json").read_text())


def accuracy(model: torch.nn.Module, loader: torch.utils.data.DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return torch.cat(hits).mean().item()


def main(folder: Path) -> None:
    set_seed(42)
    node_data = folder / "node_data"
    node_data.mkdir()
    (node_data / "node_configs.json").write_text(node_configs())
    clusterize(model=DigitsCNN(), example_args=(torch.rand(64, 1, 8, 8),), folder=node_data)

    print("\nThree providers train it; each runs `python provider.py node_<i>`:")
    failed = launch(HERE / "provider.py", folder=node_data, work=folder)
    if failed:
        sys.exit(failed)

    fused = model_fusion(cluster_id=0, folder=folder / "trained")
    model = DigitsCNN()
    model.load_state_dict(torch.load(fused, weights_only=True))
    _, val_loader = loaders()
    print(f"\naccuracy of the fused model: {accuracy(model, val_loader):.1%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
