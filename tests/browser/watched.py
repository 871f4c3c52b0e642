"""A page of the browser that remembers what went wrong in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

AXE = Path(__file__).parent / "vendor" / "axe.js"
TIMEOUT = 30_000.0
"""Milliseconds for each wait of the browser."""


@dataclass
class Watched:
    """A page of the browser, with what went wrong in it."""

    page: Any
    problems: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and uncaught exceptions."""
    hosts: set[str] = field(default_factory=set)
    """Hosts that were asked for something."""

    def watch(self) -> Watched:
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.set_default_timeout(TIMEOUT)
        return self

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def sees(self, text: str, within: str = "main") -> None:
        """Wait until a part of the page contains a text."""
        self.page.locator(within, has_text=text).first.wait_for()

    def serious_findings(self) -> list[str]:
        """Return what axe finds serious or critical."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]
