"""The reason of a worker's failure, and the memory that it takes."""

from pathlib import Path

from ravnest.provider.worker_process import following, last_line
from ravnest.schemas.providers import UsedMemory


def test_the_reason_is_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "errors.txt"
    path.write_text("Traceback\n  ...\nRunError: node_1 is gone\n\n")
    assert last_line(path) == "RunError: node_1 is gone"
    path.write_text("x" * 100_000)
    assert len(last_line(path)) == 2000
    path.write_text("one\n\x1b]0;title\x07\x1b[2Jno \u202eerror\r\n")
    assert last_line(path) == "]0;title[2Jno error", "it does not steer the owner's terminal"
    path.write_text("")
    assert last_line(path) == ""


def test_the_largest_figure_of_the_memory_is_kept() -> None:
    found = following(None, 500)
    assert found == UsedMemory(now=500, peak=500)
    found = following(following(found, 900), 300)
    assert found == UsedMemory(now=300, peak=900)
    assert following(found, -20) == UsedMemory(now=0, peak=900), "libraries freed some of theirs"
