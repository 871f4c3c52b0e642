"""Conversion of plain data in several threads at once."""

import subprocess
import sys

SCRIPT = """
import sys, threading
from dataclasses import make_dataclass
from ravnest.types import convert_checked

sys.setswitchinterval(1e-6)
for number in range(60):
    inner = make_dataclass(f"Inner{number}", [("a", int), ("b", "str | None")])
    outer = make_dataclass(f"Outer{number}", [("x", int), ("inner", inner), ("t", tuple[inner, ...])])
    data = {"x": 1, "inner": {"a": 1, "b": None}, "t": [{"a": 2, "b": "c"}]}
    threads = [threading.Thread(target=convert_checked, args=(data, outer)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_convert_to_a_type_at_the_same_time() -> None:
    """In a process of its own, because msgspec crashes it if nothing prevents this."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
