"""The page with a real server, real providers and a real run, all processes of their own."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watched import Watched

sys.path.insert(0, str(Path(__file__).parents[1] / "ecosystem"))
from forked_command import CommandStarter
from world import LONG, World, eventually, small_job

from ravnest.schemas.auth import ApiRole

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
LONGEST = 240_000.0
"""Milliseconds for each wait: processes that import torch share the cores."""
_UPDATES = (
    "Number(document.querySelector('.tiles').textContent.match(/([\\d,]+) of/)[1].replaceAll(',', ''))"
)


def updates(page: Any) -> int:
    """Return the number of updates that the job's page shows."""
    return int(page.evaluate(_UPDATES))


def sees_more_updates(page: Any, than: int) -> None:
    """Wait until the open page shows more updates, without a reload."""
    page.wait_for_function(f"(known) => {_UPDATES} > known", arg=than, timeout=LONGEST)


def zoom_in(page: Any) -> None:
    """Drag over a part of the loss curve, and wait for the curves of that part."""
    over = page.locator(".chart .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    with page.expect_request(lambda request: "curves" in request.url and "first=" in request.url):
        page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60, steps=4)
        page.mouse.up()


@pytest.mark.slow
def test_a_run_is_watched_zoomed_and_cancelled_across_a_restart(
    tmp_path: Path, open_page: Callable[..., Watched]
) -> None:
    starter = CommandStarter()
    try:
        with World(tmp_path, starter) as world:
            watch_a_run(world, open_page())
    finally:
        starter.close()


def watch_a_run(world: World, watched: Watched) -> None:
    page = watched.page
    page.set_default_timeout(LONGEST)
    world.serve()
    for name in ("attic", "cellar"):
        world.provide(name)
    page.goto(f"{world.url}/login?token={world.token(ApiRole.ADMIN)}")
    for name in ("attic", "cellar"):
        watched.sees(name, "tbody")
    handle = world.submit(world.requester(), small_job(name="real", epochs=LONG, min_providers=2))
    watched.sees("real", ".card")
    page.goto(f"{world.url}/#/jobs/{handle.id}")
    page.locator(".chart canvas").first.wait_for()
    sees_more_updates(page, 30)
    sees_more_updates(page, updates(page) + 10)
    assert page.locator(".topology .box").count() == 2
    assert page.title().startswith("real ")

    zoom_in(page)
    with page.expect_request(lambda request: "curves" in request.url and "first=" in request.url):
        sees_more_updates(page, updates(page))  # what is zoomed in on stays live
    page.get_by_label("Show all: Loss").click()
    assert watched.problems == []

    assert world.server is not None
    world.server.end(signal.SIGKILL)
    watched.sees("Disconnected", "[role=alert]")
    before = updates(page)
    world.serve(port=world.port)
    watched.sees("Live", ".connection")
    sees_more_updates(page, before)
    for words in ("These curves are old", "What you see is old"):
        playwright.expect(page.get_by_text(words)).to_have_count(0, timeout=LONGEST)

    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("button", name="Yes, cancel").click()
    watched.sees("cancelled", ".head")
    eventually(handle.view, lambda view: view.state == "cancelled")
    assert [each for each in watched.problems if "net::ERR" not in each] == []
