"""The reason of a worker's failure."""

from pathlib import Path

from ravnest.provider.worker_process import last_line


def test_the_reason_is_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "errors.txt"
    path.write_text("Traceback\n  ...\nRunError: node_1 is gone\n\n")
    assert last_line(path) == "RunError: node_1 is gone"
    path.write_text("x" * 100_000)
    assert len(last_line(path)) == 2000
    path.write_text("")
    assert last_line(path) == ""
