"""A job in a notebook: well-formed HTML, escaped names, and updates until it ends."""

from __future__ import annotations

import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

from ravnest.client.handle import JobHandle
from ravnest.client.notebook import job_html
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

        def losses(self, first: int = 0) -> LossHistory:
            return history(2.0, 1.0)

        def wait(self, timeout: float | None = None, on_change: object = None) -> JobView:
            on_change(done)  # type: ignore[operator]
            return done

    assert Handle().show() is done
    assert ["training" in shown[0], "done" in shown[1]] == [True, True]
