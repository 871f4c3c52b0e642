"""The examples run as a newcomer runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_digits_demo_reaches_95_percent(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "digits" / "demo.py")],
        cwd=tmp_path,
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
    assert "Cluster 0 : Node(0) -> Node(1) -> Node(2)" in done.stdout
    assert "node_0 | Root: epoch 5, validation accuracy" in done.stdout
    accuracy = re.search(r"^accuracy of the fused model: (\d+\.\d)%$", done.stdout, re.M)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 95.0
    assert list(tmp_path.iterdir()) == [], "the demo leaves files behind"
