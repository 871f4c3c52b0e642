"""The examples run as documented."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_demo(folder: Path, *arguments: str) -> str:
    """Run the demo, check its accuracy and that it leaves no files, and return its output."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "digits" / "demo.py"), *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"^accuracy of the fused model: (\d+\.\d)%$", done.stdout, re.M)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 95.0
    assert list(folder.iterdir()) == [], "the demo leaves files behind"
    return done.stdout


@pytest.mark.full
def test_the_digits_demo_reaches_95_percent(tmp_path: Path) -> None:
    shown = run_demo(tmp_path)
    assert "Cluster 0 : Node(0) -> Node(1) -> Node(2)" in shown
    assert "node_0 | Root: epoch 5, validation accuracy" in shown


@pytest.mark.slow
def test_two_unequal_clusters_end_with_one_model(tmp_path: Path) -> None:
    shown = run_demo(tmp_path, "2")
    assert "Cluster 0 : Node(0) -> Node(1) -> Node(2)\nCluster 1 : Node(3) -> Node(4)\n" in shown
    assert re.search(r"^node_0 \| Root: final round \d+: averaged clusters 0, 1 ", shown, re.M)
    assert "trains on all data" not in shown, "each cluster has its share"
    assert "the clusters have identical models" in shown
