"""Debian's chromium, driven by playwright; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from watched import Watched

REQUIRED = os.environ.get("RAVNEST_REQUIRE_BROWSER") == "1"
"""Tests fail without a browser, where they are skipped otherwise; set in CI."""
if REQUIRED:
    import playwright.sync_api as playwright
else:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")


# playwright keeps an event loop running in this thread; tests of other files start their own.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        missing = "chromium is not installed"
        pytest.fail(missing) if REQUIRED else pytest.skip(missing)
    with playwright.sync_playwright() as running:
        # Tests may run as root, where chromium's own sandbox does not start.
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Watched]]:
    """Opens pages, each with cookies of its own."""
    contexts = []

    def opened(**options: Any) -> Watched:
        wanted = {"viewport": {"width": 1280, "height": 900}, "bypass_csp": False, **options}
        context = chromium.new_context(**wanted)
        contexts.append(context)
        return Watched(context.new_page()).watch()

    yield opened
    for context in contexts:
        context.close()
