"""Jobs that only evaluate a model, at the server: how they end, and what is shipped for them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from seed_cases import DATA, TRAINING, World
from server_cases import Caller, Case, opened, spec, validation

from ravnest.schemas.jobs import JobSpec


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with opened(tmp_path) as found:
        yield found


def evaluation(**changes: object) -> JobSpec:
    given = spec()
    training = given.training.model_copy(update={"epochs": 0})
    fields = {"training": training, "validation": given.train, "clusters": 1, **changes}
    return given.model_copy(update=fields)


def running(case: Case) -> tuple[Caller, str, Caller]:
    rita, alice = case.requester(), case.provider()
    job: str = rita.post("/api/jobs", evaluation(), 201)["id"]
    case.match()
    alice.report("fetched")
    alice.report("training")
    return rita, job, alice


def test_a_job_without_epochs_is_done_with_its_figures(case: Case) -> None:
    rita, job, alice = running(case)
    assert rita.get(f"/api/jobs/{job}")["reason"] == "all nodes are evaluating"
    alice.report("training", records=[validation(0, 0.75)])
    alice.report("finished", first_record=1)
    view = rita.get(f"/api/jobs/{job}")
    assert (view["state"], view["reason"]) == ("done", "cluster 0 has evaluated the model")
    assert (view["progress"]["metric"], view["progress"]["validation"]) == ("accuracy", 0.75)
    refused = rita.get(f"/api/jobs/{job}/result", 409)
    assert "it only evaluates one" in refused["detail"]
    refused = rita.get(f"/api/jobs/{job}/partial", 409)
    assert "it trains no weights" in refused["detail"]


def test_without_figures_it_has_failed(case: Case) -> None:
    rita, job, alice = running(case)
    alice.report("finished")
    view = rita.get(f"/api/jobs/{job}")
    assert (view["state"], view["reason"]) == ("failed", "no Root has sent figures")


@pytest.mark.parametrize("changes", [{"validation": None}, {"clusters": None}, {"clusters": 2}])
def test_it_needs_validation_data_and_one_cluster(case: Case, changes: dict[str, object]) -> None:
    rita = case.requester()
    refused = rita.post("/api/jobs", evaluation(**changes), 422)
    assert "epochs=0 only evaluates" in str(refused)


def test_no_training_data_is_shipped(tmp_path: Path) -> None:
    world = World(tmp_path)
    planned = world.planned(2)
    training = TRAINING.model_copy(update={"epochs": 0})
    changed = planned.spec.model_copy(update={"training": training, "validation": DATA})
    root, leaf = world.ship(replace(planned, spec=changed))
    assert not root.train.files
    assert not leaf.train.files
    assert root.validation is not None
    assert root.validation.inputs
    assert leaf.validation is not None
    assert leaf.validation.labels
