"""The figures in ``docs/schedules.md`` are those of the simulator."""

from pathlib import Path

from schedule_page import BLOCK, TABLE, regenerate

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_page_shows_the_figures_of_the_simulator() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert regenerate(page) == page


def test_the_figures_are_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(BLOCK.findall(page)) == page.count("<!-- grid:") == 3
    assert len(TABLE.findall(page)) == 1
