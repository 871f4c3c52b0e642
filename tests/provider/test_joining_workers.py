"""Providers that join while a job trains become clusters of it, with real worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loopback_server import loopback_server, wait_for_updates
from running_providers import providers
from torch.utils.data import TensorDataset

from ravnest.schemas.jobs import JobView
from ravnest.server import job_pace, plan_review
from ravnest.server.scheduling import improvement

SECONDS = 600.0
EPOCHS = 100
SAMPLES = 1600
EAGER = {"improvement_check": 1.0, "improvement_pause": 2.0, "checkpoint_upload": 2.0}


@pytest.fixture
def cheap_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new plan pay after seconds: otherwise a training of several minutes is too short for it."""
    monkeypatch.setattr(job_pace, "_LEAST_SPAN", 3.0)
    monkeypatch.setattr(plan_review, "RESTART", 0.0)
    monkeypatch.setattr(improvement, "PAYBACK", 0.0)
    monkeypatch.setattr(improvement, "PAYS", 0.0)


def clusters(view: JobView) -> set[int]:
    return {each.cluster for each in view.assignments}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("cheap_moves")
def test_providers_that_join_become_clusters_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    with (
        loopback_server(tmp_path / "server", changes=EAGER) as server,
        providers(server, tmp_path, "a", "b"),
        server.submit(min_providers=2, clusters=None, epochs=EPOCHS, train_data=data) as handle,
    ):
        wait_for_updates(handle)
        before = handle.view()
        with providers(server, tmp_path, "c", "d"):

            def on_change(view: JobView) -> None:
                if {each.provider_name for each in view.assignments} == {"a", "b", "c", "d"}:
                    raise StopIteration

            with pytest.raises(StopIteration):
                handle.wait(SECONDS, on_change)
            assert len(handle.result(timeout=SECONDS)) == 6
            after = handle.view()
        said = [each.reason for each in handle.events() if each.kind == "recovery"]
    assert (after.state, after.progress.epoch) == ("done", EPOCHS)
    assert len(clusters(after)) > len(clusters(before))
    (planned,) = [each for each in said if each.startswith("planned anew: a plan with 4 providers")]
    assert "; idle: c, d; training continues from " in planned
    assert planned.endswith("the end of an epoch")
