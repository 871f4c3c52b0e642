"""Grids and tables of ``docs/schedules.md`` agree with the simulator."""

from pathlib import Path

from schedule_page import BLOCK, TABLE, regenerate

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_page_agrees_with_the_simulator() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert regenerate(page) == page


def test_all_grids_and_tables_are_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(BLOCK.findall(page)) == page.count("<!-- grid:") + page.count("<!-- line:") == 3
    assert len(TABLE.findall(page)) == 1
