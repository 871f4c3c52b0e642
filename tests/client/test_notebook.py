"""A job in a notebook: well-formed HTML, escaped names, and updates until it ends."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from xml.etree import ElementTree

import pytest

from ravnest.client.handle import JobHandle
from ravnest.client.notebook import job_html
from ravnest.errors import ServerUnreachableError, SettingsError
from ravnest.schemas.jobs import JobProgress, JobState, JobView, LossHistory


def view(**changes: object) -> JobView:
    fields: dict[str, object] = {
        "id": "job-1",
        "name": "<script>alert(1)</script>",
        "owner": "rita",
        "state": JobState.TRAINING,
        "reason": 'a & b "c"',
        "created": 0.0,
        "changed": 0.0,
        "progress": JobProgress(updates=50, total_updates=200, epoch=1, epochs=4, loss=0.5),
    }
    return JobView(**{**fields, **changes})  # type: ignore[arg-type]


def history(*losses: float | None) -> LossHistory:
    return LossHistory(first=0, updates=tuple(range(len(losses))), losses=losses, validations=())


@pytest.mark.parametrize(
    "losses", [(), (1.0,), (2.0, None, 1.0), (1.0, 1.0), tuple(1 / n for n in range(1, 2000))]
)
def test_the_html_is_well_formed_and_escaped(losses: tuple[float | None, ...]) -> None:
    found = job_html(view(), history(*losses))
    tree = ElementTree.fromstring(found)
    assert "<script" not in found
    assert "<script>alert(1)</script>" in "".join(tree.itertext())
    assert "epoch 1/4, update 50 of 200, loss 0.5000" in "".join(tree.itertext())
    lines = [each.attrib["points"].split() for each in tree.iter("polyline")]
    assert [len(line) <= 400 for line in lines] == [True] * (len(losses) > 1)


def test_a_job_is_shown_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Shown:
        def update(self, html: str) -> None:
            shown.append(html)

    display = ModuleType("IPython.display")
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda html, display_id: (shown.append(html), Shown())[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    done = view(state=JobState.DONE)

    class Handle(JobHandle):
        def __init__(self) -> None:
            pass

        def view(self) -> JobView:
            return view()

        def __repr__(self) -> str:
            return "JobHandle"

        def losses(self, first: int = 0, since: float = 0.0) -> LossHistory:
            asked.append(first)
            return history(2.0, 1.0)

        def wait(self, timeout: float | None = None, on_change: object = None) -> JobView:
            for each in (view(), done):
                on_change(each)  # type: ignore[operator]
            return done

    asked: list[int] = []
    assert Handle().show() is done
    assert ["training" in shown[0], "done" in shown[2]] == [True, True]
    assert asked == [0, 0, 2], "only new losses are downloaded"


class Away(JobHandle):
    """Handle of a job whose server does not answer."""

    id = "job-1"

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return "JobHandle('<job-1>')"

    def view(self) -> JobView:
        raise ServerUnreachableError("it is <away>")


def test_a_server_that_is_away_is_a_line_of_html() -> None:
    found = ElementTree.fromstring(Away()._repr_html_())
    assert "".join(found.itertext()) == "JobHandle('<job-1>'): it is <away>"


def test_without_ipython_the_error_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(SettingsError, match="IPython is not installed: use wait"):
        Away().show()


def test_the_curve_ends_with_the_last_update() -> None:
    found = job_html(view(), history(*(1 / n for n in range(1, 1000))))
    assert 'text-anchor="end" font-size="10" fill="currentColor" opacity=".7">998</text>' in found


def test_a_widget_shows_the_job_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    widgets: list[object] = []

    class HTML:
        def __init__(self, value: str) -> None:
            self.value = value
            widgets.append(self)

        def _repr_mimebundle_(self, **_options: object) -> dict[str, object]:
            return {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}

    fake = ModuleType("ipywidgets")
    fake.HTML = HTML  # type: ignore[attr-defined]

    class Handle(Away):
        def view(self) -> JobView:
            return view()

        def losses(self, first: int = 0, since: float = 0.0) -> LossHistory:
            return history(2.0, 1.0)

        def wait(self, timeout: float | None = None, on_change: object = None) -> JobView:
            done = view(state=JobState.DONE)
            on_change(done)  # type: ignore[operator]
            over.set()
            return done

    monkeypatch.setitem(sys.modules, "ipywidgets", fake)
    found = Handle()._repr_mimebundle_(include=None, exclude=None)
    assert set(found) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert over.wait(60)
    (widget,) = widgets
    assert "done" in widget.value  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert set(Handle()._repr_mimebundle_()) == {"text/plain", "text/html"}
