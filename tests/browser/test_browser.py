"""The page in a real browser, with a real server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from loopback_server import loopback_server, small_job
from running_providers import providers
from scene import NAMES, Scene, busy_scene, running, training_records
from watched import TIMEOUT, Watched

import ravnest
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState
from ravnest.telemetry import PhaseRecord, QueueRecord, RoundRecord

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
OpenPage = Callable[..., Watched]
_HEARD = """(since) => import("/static/store.js").then(({ store, subscribe }) => new Promise((done) => {
  const check = () => store.heard > since && done();
  subscribe(check);
  check();
}))"""
"""Script that waits for a message of the stream."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scene")


@pytest.fixture(scope="module")
def busy(folder: Path) -> Iterator[tuple[Scene, str]]:
    with running(folder) as scene:
        yield scene, busy_scene(scene, updates=600)


def root_of(scene: Scene, job: str) -> str:
    with scene.server.db.read() as db:
        (root, *_) = (each for each in db.assignments.of_job(job) if each.node == 0)
    return next(name for name, caller in scene.providers.items() if caller.id == root.provider)


def test_every_view_loads_without_errors_or_findings(
    busy: tuple[Scene, str], open_page: OpenPage
) -> None:
    scene, job = busy
    watched = open_page()
    watched.page.goto(scene.link(ApiRole.ADMIN))
    watched.sees("gpt-small on wiki", ".card")
    for name in NAMES:
        watched.sees(name, "tbody")
    found = watched.serious_findings()
    views = {
        f"jobs/{job}": ".chart canvas",
        f"providers/{scene.providers['attic'].id}": ".events li",
        "join": "#members",
    }
    for path, ready in views.items():
        watched.page.goto(f"{scene.url}/#/{path}")
        watched.page.locator(ready).first.wait_for()
        found += watched.serious_findings()
    assert found == []
    assert watched.problems == []
    assert watched.hosts == {urlsplit(scene.url).netloc}


def test_a_phone_in_the_dark_shows_the_same(busy: tuple[Scene, str], open_page: OpenPage) -> None:
    scene, job = busy
    watched = open_page(viewport={"width": 390, "height": 800}, color_scheme="dark", has_touch=True)
    watched.page.goto(scene.link())
    watched.sees("gpt-small on wiki", ".card")
    watched.page.goto(f"{scene.url}/#/jobs/{job}")
    watched.page.locator(".chart canvas").first.wait_for()
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.serious_findings() == []
    assert watched.problems == []


def test_a_failure_is_told_once_and_opens(busy: tuple[Scene, str], open_page: OpenPage) -> None:
    scene, _ = busy
    watched = open_page()
    watched.page.goto(scene.link())
    watched.sees("and 5 more: the loss is not a number", ".rows .reason")
    watched.page.locator(".rows .reason").get_by_role("button", name="More").click()
    watched.sees("node_5 of cluster 1", ".rows .reason")
    watched.page.goto(f"{scene.url}/#/jobs/none")
    watched.sees("There is no job none", ".notice")
    found = watched.serious_findings()
    with scene.server.db.read() as db:
        for state in (JobState.FAILED, JobState.SUBMITTED):
            watched.page.goto(f"{scene.url}/#/jobs/{db.jobs.in_state(state)[0].id}")
            watched.page.locator(".events li").first.wait_for()
            found += watched.serious_findings()
    assert found == []
    assert [each for each in watched.problems if "404" not in each] == []


def test_an_update_is_shown_without_a_reload(busy: tuple[Scene, str], open_page: OpenPage) -> None:
    scene, job = busy
    watched = open_page()
    watched.page.goto(scene.link())
    watched.sees("Update 600 of", ".card")
    scene.report(root_of(scene, job), training_records(600, 7))
    watched.sees("Update 607 of", ".card")
    watched.page.goto(f"{scene.url}/#/jobs/{job}")
    watched.sees("607 of")
    for title in ("Loss", "Validation accuracy", "Learning rate", "Samples per second", "Staleness"):
        watched.sees(title, ".chart figcaption")
    watched.sees("Utilisation of the stages", ".chart figcaption")
    watched.sees("compute ", ".topology")
    assert watched.problems == []


def test_the_memory_of_each_stage_is_the_measured_one(
    busy: tuple[Scene, str], open_page: OpenPage
) -> None:
    scene, job = busy
    watched = open_page()
    watched.page.goto(scene.link())
    watched.page.goto(f"{scene.url}/#/jobs/{job}")
    watched.sees("2.8 GB of", ".topology .box")
    watched.sees("peak 3.0 GB · plan 3.1 GB", ".topology .box")
    memory = {"now": 4_400_000_000, "peak": 4_700_000_000}
    scene.report(root_of(scene, job), [QueueRecord(5, 6, 1)], memory=memory)
    watched.sees("4.4 GB of", ".topology .box")
    watched.sees("peak 4.7 GB · plan 3.1 GB", ".topology .box")
    assert watched.problems == []


@pytest.mark.parametrize(("width", "rings"), [(1280, 3), (390, 1)])
def test_the_rings_light_up_during_a_round(
    busy: tuple[Scene, str], open_page: OpenPage, width: int, rings: int
) -> None:
    """A ring for each stage; in a narrow window, one drawing for all rings between two clusters."""
    scene, job = busy
    watched = open_page(viewport={"width": width, "height": 900})
    watched.page.goto(scene.link())
    watched.page.goto(f"{scene.url}/#/jobs/{job}")
    lit = watched.page.locator(".topology .ring.active")
    playwright.expect(watched.page.locator(".topology .ring")).to_have_count(rings, timeout=TIMEOUT)
    playwright.expect(lit).to_have_count(0, timeout=TIMEOUT)
    scene.report(root_of(scene, job), [QueueRecord(5, 6, 1, averaging=True)])
    playwright.expect(lit).to_have_count(rings, timeout=TIMEOUT)
    scene.report(root_of(scene, job), [QueueRecord(5, 6, 1)])
    playwright.expect(lit).to_have_count(0, timeout=TIMEOUT)
    for name in NAMES:
        scene.report(name, [PhaseRecord("average", 5)])
    playwright.expect(lit).to_have_count(rings, timeout=TIMEOUT)
    number = 1000 + width
    done = RoundRecord(number, 1, "blocking", True, (0, 1), 1.9, 412_000_000, "")
    for name in NAMES:
        scene.report(name, [PhaseRecord("train", 5)])
    scene.report(root_of(scene, job), [done])
    watched.sees(str(number), "section[aria-labelledby=rounds] tbody")
    playwright.expect(lit).to_have_count(0, timeout=TIMEOUT)
    assert watched.problems == []


def last_update(scene: Scene, job: str) -> int:
    with scene.server.db.read() as db:
        loss = db.telemetry.last_loss(next(e for e in db.assignments.of_job(job) if e.node == 0).id)
    assert loss is not None
    return loss.update


def zoom_out(page: Any, title: str) -> None:
    """Zoom out until the whole curve is shown: then it follows new points again."""
    everything = page.get_by_label(f"Show all: {title}")
    playwright.expect(everything).to_be_enabled(timeout=TIMEOUT)
    for _ in range(12):
        if everything.is_disabled():
            break
        page.get_by_label(f"Zoom out: {title}").click()
    playwright.expect(everything).to_be_disabled(timeout=TIMEOUT)


def test_a_curve_is_zoomed_smoothed_and_scaled(busy: tuple[Scene, str], open_page: OpenPage) -> None:
    scene, job = busy
    watched = open_page()
    page = watched.page
    page.goto(scene.link())
    watched.sees("gpt-small on wiki", ".card")
    page.goto(f"{scene.url}/#/jobs/{job}")
    over = page.locator(".chart .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    with page.expect_request(lambda request: "first=" in request.url and "curves" in request.url):
        page.mouse.move(box["x"] + 60, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 160, box["y"] + 60, steps=4)
        page.mouse.up()
    with page.expect_request(lambda request: "first=" in request.url and "curves" in request.url):
        scene.report(root_of(scene, job), training_records(last_update(scene, job) + 1, 3))
    zoom_out(page, "Loss")
    page.get_by_label("Zoom in: Samples per second").click()
    zoom_out(page, "Samples per second")
    page.get_by_label("Logarithmic").check()
    page.get_by_label("Smoothing").fill("0.6")
    plot = page.locator(".plot").first
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    watched.sees("smoothed", ".chart output")
    assert watched.problems == []


def test_a_requester_without_jobs_and_a_viewer_cannot_cancel(
    busy: tuple[Scene, str], open_page: OpenPage
) -> None:
    scene, job = busy
    viewer, requester = open_page(), open_page()
    viewer.page.goto(scene.link())
    viewer.sees("gpt-small on wiki", ".card")
    viewer.page.goto(f"{scene.url}/#/jobs/{job}")
    viewer.page.locator(".topology").wait_for()
    assert viewer.page.get_by_role("button", name="Cancel job").count() == 0
    assert viewer.page.get_by_role("button", name="Resubmit like this").count() == 0
    viewer.page.goto(f"{scene.url}/#/join")
    viewer.sees("Tokens come from the admin")
    requester.page.goto(scene.link(ApiRole.REQUESTER))
    requester.sees("No jobs yet")
    requester.sees("for another requester", "tbody")
    assert viewer.problems == []
    assert requester.problems == []


def test_an_admin_creates_a_token_and_cancels_a_job(
    busy: tuple[Scene, str], open_page: OpenPage
) -> None:
    scene, job = busy
    watched = open_page()
    page = watched.page
    page.goto(scene.link(ApiRole.ADMIN))
    watched.sees("gpt-small on wiki", ".card")
    page.goto(f"{scene.url}/#/join")
    page.get_by_role("button", name="Create token").click()
    watched.sees(f"ravnest provide --server {scene.url} --token rvn.", ".notice")
    tokens = page.locator("section[aria-labelledby=tokens] tbody tr")
    chosen = tokens.filter(has_text=tokens.first.locator("code").inner_text())
    chosen.get_by_role("button", name="Revoke").click()
    chosen.get_by_role("button", name="Revoke").click()
    playwright.expect(chosen).to_have_count(0)
    page.goto(f"{scene.url}/#/jobs/{job}")
    page.get_by_role("button", name="Cancel job").click()
    found = watched.serious_findings()
    page.get_by_role("button", name="Yes, cancel").click()
    watched.sees("cancelled", ".head")
    assert found + watched.serious_findings() == []
    page.get_by_role("button", name="Resubmit like this").click()
    page.get_by_role("button", name="Yes, submit").click()
    page.wait_for_url(lambda url: "#/jobs/job-" in url and not url.endswith(job))
    watched.sees("gpt-small on wiki", "h1")
    watched.sees(urlsplit(page.url).fragment.removeprefix("/jobs/"), "code")
    page.goto(f"{scene.url}/#/")
    watched.sees("gpt-small on wiki", ".rows")
    assert watched.problems == []


def test_it_survives_a_restart_of_the_server(tmp_path: Path, open_page: OpenPage) -> None:
    watched = open_page()
    page = watched.page
    with running(tmp_path) as scene:
        page.goto(scene.url)
        watched.sees("This page is for members")
        found = watched.serious_findings()
        page.goto(scene.link())
        watched.sees("No providers yet")
        found += watched.serious_findings()
        scene.join("attic")
        watched.sees("attic", "tbody")
        port = int(urlsplit(scene.url).port or 0)
    watched.sees("Disconnected", "[role=alert]")
    assert "old" in page.locator("main").get_attribute("class")
    assert found + watched.serious_findings() == []
    with running(tmp_path, port) as scene:
        watched.sees("Live", ".connection")
        scene.join("cellar")
        watched.sees("cellar", "tbody")
        (admin,) = (each.id for each in scene.server.auth.members() if each.name == "browser")
        scene.server.revoke(admin)
        page.get_by_text("You are logged out").wait_for()


def test_a_hidden_page_rests_until_it_is_seen(busy: tuple[Scene, str], open_page: OpenPage) -> None:
    scene, _ = busy
    watched = open_page()
    page = watched.page
    page.clock.install()
    page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.isUnseen})")
    page.goto(scene.link())
    watched.sees("Live", ".connection")
    page.evaluate("isUnseen = true; document.dispatchEvent(new Event('visibilitychange'))")
    for _ in range(2):
        page.clock.fast_forward(10_000)
        now = page.evaluate("performance.now()")
        scene.server.notifications.notify(("page", ""))
        page.evaluate(_HEARD, now)  # otherwise it would be called silent before it rests
    page.clock.fast_forward(11_000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(3):
        page.clock.fast_forward(31_000)
    assert asked == []
    with page.expect_request("**/page/stream"):
        page.evaluate("isUnseen = false; document.dispatchEvent(new Event('visibilitychange'))")
    watched.sees("Live", ".connection")
    assert watched.problems == []


def test_a_page_without_a_place_says_why(busy: tuple[Scene, str], open_page: OpenPage) -> None:
    scene, _ = busy
    watched = open_page()
    page = watched.page
    page.goto(scene.link())
    watched.sees("Live", ".connection")
    page.route("**/page/stream", lambda route: route.fulfill(status=429, json={"detail": "no place"}))
    words = {"id": "x", "name": "x", "role": "viewer", "refusal": "too many browsers watch this server"}
    page.route("**/page/whoami", lambda route: route.fulfill(json=words))
    page.reload()
    watched.sees("Too many browsers watch this server", "[role=alert]")
    watched.sees("there is nothing to show yet", "[role=alert]")
    assert watched.serious_findings() == []


def test_a_real_run_is_shown(tmp_path: Path, open_page: OpenPage) -> None:
    watched = open_page()
    with loopback_server(tmp_path) as server, providers(server, tmp_path, "attic"):
        token = server.running.token(ApiRole.VIEWER)
        watched.page.goto(f"{server.url}/login?token={token}")
        watched.sees("attic", "tbody")
        handle = ravnest.submit(
            **small_job(name="real"), server=server.url, token=server.running.token(ApiRole.REQUESTER)
        )
        handle.wait(120.0)
        watched.page.goto(f"{server.url}/#/jobs/{handle.id}")
        watched.sees("done", ".head")
        watched.page.locator(".chart canvas").first.wait_for()
        watched.page.locator(".topology .box").first.wait_for()
        assert watched.problems == []
