"""Figures for Prometheus: the text format, and that members see no more than elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from server_cases import losses, opened

from ravnest.logs.prometheus import Figure, Sample, exposition
from ravnest.schemas.auth import ApiRole

_LINE = re.compile(r'^[a-z_]+(\{[a-z]+="(\\.|[^"\\\n])*"(,[a-z]+="(\\.|[^"\\\n])*")*\})? \S+$')


def test_labels_are_escaped() -> None:
    figure = Figure("x", "gauge", "A text.", [Sample({"name": 'a "b"\\\nc'}, 1.5), Sample({}, 2)])
    assert exposition([figure]) == (
        '# HELP x A text.\n# TYPE x gauge\nx{name="a \\"b\\"\\\\\\nc"} 1.5\nx 2\n'
    )


def test_a_running_job_is_shown_to_those_who_may_see_it(tmp_path: Path) -> None:
    with opened(tmp_path) as case:
        rita, other = case.requester(), case.requester("other")
        provider = case.provider(ram=4)
        job = case.submit(rita)
        case.match()
        provider.report("training", records=losses(2.0, 0.75))
        text = rita.get("/metrics").decode()
        lines = text.splitlines()
        assert all(line.startswith("# ") or _LINE.match(line) for line in lines), text
        assert f'ravnest_job_updates{{job="{job}",name="digits"}} 2' in text
        assert "# TYPE ravnest_job_updates gauge" in lines, "it falls after the loss of a node"
        assert f'ravnest_job_loss{{job="{job}",name="digits"}} 0.75' in text
        assert 'ravnest_providers{state="training"} 1' in lines
        assert 'ravnest_offered_memory_bytes{used="yes"} 4000000000' in lines
        assert job not in other.get("/metrics").decode()
        assert job in case.member(ApiRole.VIEWER).get("/metrics").decode()
        provider.get("/metrics", 403)
        assert case.client.get("/metrics").status_code == 401
