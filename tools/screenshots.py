"""Writes pictures of the page in each of its states, with chromium and a scripted scene.

``make screenshots`` runs it. All pictures go to ``build/screenshots``; those that the documents show are
also written to ``docs/images``, with fewer colours, so that they are small.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, Route, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "browser")]
from scene import Scene, busy_scene, running, training_records

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobState, ResultFile
from ravnest.schemas.providers import ProviderState

logger = logging.getLogger("screenshots")

BUILD = ROOT / "build" / "screenshots"
DOCS = ROOT / "docs" / "images"
SHOWN = {"overview": "page.png", "job": "page-job.png", "phone-dark-job": "page-phone.png"}
"""Pictures that the documents show, and their names there."""
_COLOURS = 128
_TALLEST = {"page-job.png": 1304, "page-phone.png": 1688}
"""Pixels of pictures that are cut."""
_UPDATES, _TOTAL = 1100, 2400
"""Updates of the running job, and of the one that is done."""
RESULT = ResultFile(name="node_0.json", artifact=Artifact(sha256="0" * 64, size=1))
_TRAINING = 1500.0
"""Seconds that the training of the scene seems to have taken."""


@dataclass(frozen=True)
class Look:
    """Size and theme of a browser."""

    name: str
    width: int
    height: int
    scheme: str
    scale: float = 1.0


DESKTOP = Look("", 1280, 860, "light")
LOOKS = (
    DESKTOP,
    Look("dark-", 1280, 860, "dark"),
    Look("phone-", 390, 844, "light", 2.0),
    Look("phone-dark-", 390, 844, "dark", 2.0),
)


@dataclass(frozen=True)
class Photographer:
    """Takes pictures of the page, in several looks."""

    browser: Browser
    scene: Scene
    only: str
    """Part of the names of the pictures to take."""

    def take(
        self,
        name: str,
        path: str,
        ready: str,
        role: ApiRole = ApiRole.VIEWER,
        act: Callable[[Page], object] = lambda _page: None,
    ) -> None:
        """Take pictures of a view once ``ready`` is there and ``act`` was done."""
        for look in LOOKS:
            if self.only in look.name + name:
                with self.opened(look) as page:
                    self.log_in(page, role)
                    show_signs_of_life(self.scene)
                    page.goto(f"{self.scene.url}/#{path}")
                    page.locator(ready).first.wait_for()
                    act(page)
                    write(page, look.name + name)

    @contextmanager
    def opened(self, look: Look) -> Iterator[Page]:
        """Open a page with cookies of its own."""
        context = self.browser.new_context(
            viewport={"width": look.width, "height": look.height},
            color_scheme=look.scheme,
            device_scale_factor=look.scale,
            reduced_motion="reduce",
        )
        try:
            yield context.new_page()
        finally:
            context.close()

    def log_in(self, page: Page, role: ApiRole = ApiRole.VIEWER) -> None:
        """Log a page in and wait until it is live."""
        page.goto(self.scene.link(role))
        page.locator(".connection.live").wait_for()


def write(page: Page, name: str) -> None:
    """Write a picture of the whole page as it is now."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(400)  # charts and folded parts are drawn in the next frames
    path = BUILD / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    logger.info("%s", path.relative_to(ROOT))


def show_signs_of_life(scene: Scene) -> None:
    """Have the providers and jobs of a scene be heard of just now."""
    with scene.server.db.write(time.time()) as db:
        present = {each.id for each in db.providers.present() if each.state is not ProviderState.LOST}
        for job in db.jobs.in_state(JobState.TRAINING):
            db.jobs.touch(job.id)
    for caller in scene.providers.values():
        if caller.id in present:
            caller.heartbeat()
    scene.server.notifications.notify(("page", ""))


def spread_times(scene: Scene, job: str) -> None:
    """Have what a scene reported within a second look like minutes of training."""
    now = time.time()
    with scene.server.db.write(now) as db:
        execute = db.telemetry._connection.exec_driver_sql
        (last,) = execute(
            "SELECT max(position) FROM records WHERE assignment LIKE ?", (f"{job}%",)
        ).one()
        execute(
            "UPDATE records SET time = ? - ? * (? - position) / ? WHERE assignment LIKE ?",
            (now, _TRAINING, last, last, f"{job}%"),
        )
        submitted = now - _TRAINING - 60.0
        (first,) = execute("SELECT min(sequence) FROM events WHERE subject = ?", (job,)).one()
        execute("UPDATE events SET time = ? + 1.5 * (sequence - ?)", (submitted, first))
        for kind, update in (("recovery", 503), ("round", 400)):
            then = now - _TRAINING * (1 - update / _UPDATES)
            execute("UPDATE events SET time = ? WHERE kind = ? AND sequence >= ?", (then, kind, first))
        execute("UPDATE jobs SET created = ? WHERE id = ?", (submitted, job))
        execute(
            "UPDATE jobs SET created = ?, changed = ? WHERE state = 'failed'",
            (submitted - 120.0, submitted - 20.0),
        )


def lose_one(scene: Scene, name: str) -> None:
    """Have an idle provider be lost."""
    with scene.server.db.write(time.time() - 240.0) as db:
        record = db.providers.get(scene.providers[name].id)
        assert record is not None
        db.providers.move(record, ProviderState.LOST, "it was silent for 30 s", job=None)


def finish(scene: Scene, job: str) -> None:
    """End a job as if it had trained to the end."""
    with scene.server.db.write(time.time()) as db:
        root, *_ = own = db.assignments.of_job(job)
        records = training_records(_UPDATES, _TOTAL - _UPDATES)
        db.telemetry.add(root, root.records, records)
        for each in own:
            db.assignments.move(each, "finished")
            db.assignments.set_result(each, (RESULT,))
        record = db.jobs.get(job)
        assert record is not None
        db.jobs.move(record, JobState.DONE, "the trained model can be fetched")
    scene.server.notifications.notify(("page", ""))


def job_in(scene: Scene, state: JobState) -> str:
    """Return a job in a state."""
    with scene.server.db.read() as db:
        return db.jobs.in_state(state)[0].id


def take_all(browser: Browser, folder: Path, only: str) -> None:
    """Take all pictures."""
    with running(folder / "empty") as scene:
        Photographer(browser, scene, only).take("empty", "/", ".empty", ApiRole.ADMIN)
    with running(folder / "busy") as scene:
        photos = Photographer(browser, scene, only)
        job = busy_scene(scene, _UPDATES)
        spread_times(scene, job)
        attic = scene.providers["attic"].id
        show_signs_of_life(scene)
        lose_one(scene, "library-2")
        photos.take("overview", "/", ".card")
        photos.take("job", f"/jobs/{job}", ".chart canvas")
        waiting, failed = (job_in(scene, each) for each in (JobState.SUBMITTED, JobState.FAILED))
        photos.take("job-waiting", f"/jobs/{waiting}", ".events")
        photos.take("job-failed", f"/jobs/{failed}", ".events")
        photos.take("provider", f"/providers/{attic}", ".events")
        create = "button.primary"
        photos.take("join", "/join", create, ApiRole.ADMIN, lambda page: page.locator(create).click())
        photos.take("join-viewer", "/join", ".notice")
        photos.take("error", "/jobs/none", ".notice.bad")
        finish(scene, job)
        photos.take("job-done", f"/jobs/{job}", ".chart canvas")
        take_strangers(photos)
    take_disconnected(browser, folder / "gone", only)


def take_strangers(photos: Photographer) -> None:
    """Take pictures of the page before it has any data."""
    for look in LOOKS:
        if photos.only in f"{look.name}login":
            with photos.opened(look) as page:
                page.goto(photos.scene.url)
                write(page, f"{look.name}login")
        if photos.only in f"{look.name}loading":
            take_loading(photos, look)


def take_loading(photos: Photographer, look: Look) -> None:
    """Take a picture of a page whose stream is not answered."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    with photos.opened(look) as page:
        photos.log_in(page)
        page.route("**/page/stream", hold)
        page.reload()
        page.locator(".skeleton").first.wait_for()
        write(page, f"{look.name}loading")
        for route in held:
            route.abort()


def take_disconnected(browser: Browser, folder: Path, only: str) -> None:
    """Take pictures of pages whose server has gone."""
    looks = [look for look in LOOKS if only in f"{look.name}disconnected"]
    if not looks:
        return
    opened: list[tuple[Any, Page, Look]] = []
    with running(folder) as scene:
        photos = Photographer(browser, scene, only)
        spread_times(scene, busy_scene(scene, 600))
        for look in looks:
            context = photos.opened(look)
            page = context.__enter__()
            opened.append((context, page, look))
            photos.log_in(page)
            page.locator(".card").first.wait_for()
    for context, page, look in opened:
        page.locator("main.old").wait_for()
        write(page, f"{look.name}disconnected")
        context.__exit__(None, None, None)


def write_shown() -> None:
    """Write those pictures that the documents show, with few colours."""
    for name, shown in SHOWN.items():
        if not (BUILD / f"{name}.png").exists():
            continue
        with Image.open(BUILD / f"{name}.png") as picture:
            size = (0, 0, picture.width, min(picture.height, _TALLEST.get(shown, picture.height)))
            small = picture.convert("RGB").crop(size).quantize(_COLOURS, dither=Image.Dither.NONE)
        small.save(DOCS / shown, optimize=True)
        logger.info("%s: %d kB", DOCS / shown, (DOCS / shown).stat().st_size // 1000)


def main() -> None:
    """Take the pictures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the pictures to take")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed; on Debian: apt-get install chromium")
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take_all(browser, Path(folder), options.only)
        browser.close()
    write_shown()


if __name__ == "__main__":
    main()
