"""What is read of a worker's files."""

from pathlib import Path

from ravnest.provider.worker_process import FigureTail, last_line
from ravnest.schemas.providers import AssignmentReport


def test_figures_come_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "losses.txt"
    tail = FigureTail(path)
    assert tail.read() == ()
    path.write_text("3\n2.5\n1.")
    assert tail.read() == (3.0, 2.5)
    assert tail.read() == ()
    with path.open("a") as file:
        file.write("25\n")
    assert tail.read() == (1.25,)


def test_figures_that_are_no_numbers_can_be_told(tmp_path: Path) -> None:
    path = tmp_path / "losses.txt"
    path.write_text("nan\ninf\n-inf\nrubbish\n0.5\n")
    figures = FigureTail(path).read()
    assert figures == (None, None, None, None, 0.5)
    AssignmentReport(assignment="a", phase="training", losses=figures).model_dump_json()


def test_the_reason_is_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "errors.txt"
    path.write_text("Traceback\n  ...\nRunError: node_1 is gone\n\n")
    assert last_line(path) == "RunError: node_1 is gone"
    path.write_text("x" * 100_000)
    assert len(last_line(path)) == 2000
    path.write_text("")
    assert last_line(path) == ""
