"""The page in chromium with 1,000 providers and a job with 100,000 losses.

A real server with a scripted job; what the page shows comes over its routes and its stream. *First
paint* is the browser's first contentful paint, *complete* the time from the navigation until the
overview shows its jobs and providers, or the job's page its loss curve; both with an empty cache.
*Update* is the time from the arrival of a message, or of details or curves that are loaded again, until
the document is changed, while losses arrive, and while 100 providers change at once; the overview shows
50 providers per page. *Processor* is the processor time of the browser's task in which that happens,
which depends little on what else runs.
*Shown after* is the time from the provider's report, or the change in the database, until then, as seen
by a program that looks every 20 ms. *Longest task* is the longest time for which the page was busy
without a break after it was loaded, with style, layout and curves (the browser reports tasks from 50 ms
on). Run as a script to print the table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / each) for each in ("browser", ".")]
from scene import Scene, busy_scene, running, training_records
from server_cases import offer

from ravnest.schemas.auth import ApiRole
from ravnest.server.db.records import AssignmentRecord, MemberRecord
from ravnest.telemetry import LossRecord

PROVIDERS = 1000
LOSSES = 100_000
LOADS = 5
UPDATES = 20
CHANGED = 100
_PATIENCE = 20.0
"""Seconds that an update may take to arrive."""
_WATCH = """
window.seen = {};
window.longest = 0;
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) window.longest = Math.max(window.longest, each.duration);
}).observe({type: "longtask"});
new MutationObserver(() => {
  for (const each of ["tbody tr", ".chart canvas"])
    if (!window.seen[each] && document.querySelector(each)) window.seen[each] = performance.now();
}).observe(document, {subtree: true, childList: true});
"""
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
_DURATIONS = "performance.getEntriesByName('update').map((each) => each.duration)"
_RELOADS = "performance.getEntriesByName('reload').map((each) => each.duration)"


@dataclass(frozen=True)
class Loads:
    """Times of several loads of a view, in milliseconds."""

    paints: Sequence[float]
    complete: Sequence[float]


@dataclass(frozen=True)
class Changes:
    """Times of updates of a view, in milliseconds."""

    durations: Sequence[float]
    processor: Sequence[float]
    """Processor times of the tasks with these updates."""
    delays: Sequence[float]
    longest_task: float


def measure(providers: int = PROVIDERS, losses: int = LOSSES) -> str:
    """Return the table of a server with so many providers and losses."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as scene, _chromium() as browser:
        job = busy_scene(scene, updates=200)
        _add_providers(scene, providers - len(scene.providers))
        _add_losses(scene, job, losses)
        views = {
            "overview": ("/", "tbody tr"),
            "job": (f"/jobs/{job}", ".chart canvas"),
        }
        rows = []
        for name, (path, ready) in views.items():
            loads = _loads(browser, scene, path, ready)
            for what in ("losses", "providers"):
                changes = _changes(browser, scene, job, path, ready, what)
                rows.append(_row(name, what, loads, changes))
    return "\n".join([
        f"{providers:,} providers, {losses:,} losses; median and largest of {LOADS} loads and "
        f"{UPDATES} updates:",
        "",
        "| view | changes | first paint, ms | complete, ms | update, ms | processor, ms "
        "| shown after, ms | longest task, ms |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ])  # fmt: skip


def _row(name: str, what: str, loads: Loads, changes: Changes) -> str:
    task = f"{changes.longest_task:.0f}" if changes.longest_task else "below 50"
    times = (changes.durations, changes.processor, changes.delays)
    figures = (loads.paints, loads.complete, *times)
    words = [f"{statistics.median(each):.0f} (max. {max(each):.0f})" for each in figures]
    return f"| {name} | {what} | {' | '.join(words)} | {task} |"


@contextmanager
def _chromium() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("chromium is not installed; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def _logged_in(browser: Browser, scene: Scene) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.add_init_script(_WATCH)
    page.goto(f"{scene.url}/static/icon.svg")  # a page of the server, without its scripts
    link = scene.link(ApiRole.ADMIN)
    page.evaluate("(link) => fetch(link).then((answer) => answer.text())", link)
    yield page
    context.close()


def _loads(browser: Browser, scene: Scene, path: str, ready: str) -> Loads:
    paints, complete = [], []
    for _ in range(LOADS):
        with _logged_in(browser, scene) as page:
            page.goto(f"{scene.url}/#{path}")
            page.locator(ready).first.wait_for()
            paints.append(page.evaluate(_PAINT))
            complete.append(page.evaluate("(name) => window.seen[name]", ready))
    return Loads(paints, complete)


def _changes(
    browser: Browser,
    scene: Scene,
    job: str,
    path: str,
    ready: str,
    what: str,
) -> Changes:
    """Measure updates while losses arrive, or while many providers change."""
    with _logged_in(browser, scene) as page:
        page.goto(f"{scene.url}/#{path}")
        page.locator(ready).first.wait_for()
        page.wait_for_timeout(3000)
        page.evaluate("performance.clearMeasures(); window.longest = 0")
        browser.start_tracing(page=page, categories=["toplevel", "blink.user_timing"])
        delays = []
        for number in range(UPDATES):
            before = len(page.evaluate(_DURATIONS))
            if what == "providers":
                _change_providers(scene, number)
            else:
                _report(scene, job)
            began = time.monotonic()
            while len(page.evaluate(_DURATIONS)) <= before and time.monotonic() < began + _PATIENCE:
                page.wait_for_timeout(20)
            delays.append(1000 * (time.monotonic() - began))
        page.wait_for_timeout(1000)
        processor = _processor_times(json.loads(browser.stop_tracing())["traceEvents"])
        durations = [*page.evaluate(_DURATIONS), *page.evaluate(_RELOADS)]
        return Changes(durations, processor, delays, page.evaluate("window.longest"))


def _processor_times(trace: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the milliseconds of processor time of the tasks in which updates ended."""
    ends = [each for each in trace if each["name"] in ("update", "reload") and each["ph"] == "e"]
    tasks = [each for each in trace if each["name"].endswith("::RunTask") and "tdur" in each]
    times = [
        [
            task["tdur"] / 1000
            for task in tasks
            if task["tid"] == end["tid"] and task["ts"] <= end["ts"] <= task["ts"] + task["dur"]
        ]
        for end in ends
    ]
    return [max(each) for each in times if each]  # the trace may begin or end within a task


def _root(scene: Scene, job: str) -> AssignmentRecord:
    with scene.server.db.read() as db:
        return next(each for each in db.assignments.of_job(job) if each.node == 0)


def _report(scene: Scene, job: str) -> None:
    root = _root(scene, job)
    name = next(name for name, caller in scene.providers.items() if caller.id == root.provider)
    with scene.server.db.read() as db:
        last = db.telemetry.last_loss(root.id)
    assert last is not None
    scene.sent[root.id] = root.records
    scene.report(name, training_records(last.update + 1, 3, total=200_000))


def _change_providers(scene: Scene, number: int) -> None:
    """Have many providers offer another amount of memory."""
    with scene.server.db.write(time.time()) as db:
        for record in db.providers.present()[:CHANGED]:
            db.providers.update(record.id, record.offer.model_copy(update={"ram": 4.0 + number % 7}))
    scene.server.notifications.notify(("page", ""))


def _add_providers(scene: Scene, count: int) -> None:
    with scene.server.db.write(time.time()) as db:
        for number in range(count):
            member = MemberRecord(f"provider-{number:05}", ApiRole.PROVIDER, f"machine-{number:05}")
            db.members.add(member, f"secret-{number}")
            made = offer(
                member.name,
                ram=4.0,
                cores=4,
                compute=60.0,
                bandwidth=90.0,
                address=f"127.0.0.1:{number + 10_000}",
            )
            db.providers.add(member.id, made, "joined")


def _add_losses(scene: Scene, job: str, count: int) -> None:
    for first in range(200, count, 4000):
        records = [
            each
            for each in training_records(first, min(4000, count - first), total=200_000)
            if isinstance(each, LossRecord)
        ]
        root = _root(scene, job)
        with scene.server.db.write(time.time()) as db:
            db.telemetry.add(root, root.records, records)
            db.jobs.touch(job)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--providers", type=int, default=PROVIDERS)
    parser.add_argument("--losses", type=int, default=LOSSES)
    options = parser.parse_args()
    print(measure(options.providers, options.losses))


if __name__ == "__main__":
    main()
