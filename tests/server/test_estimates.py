"""Estimates of jobs: what fits, what is missing, and what training takes; nothing is stored."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from server_cases import Case, offer, opened
from test_planner_process import Wire
from torch import nn

from ravnest.cli.estimate_text import estimate_lines
from ravnest.errors import JobError, StageFormatError
from ravnest.jobs.estimate import pack_estimate
from ravnest.jobs.job import Job
from ravnest.jobs.packing import pack_job
from ravnest.schemas.estimates import EstimateRequest, JobEstimate
from ravnest.server.scheduling.estimates import estimate_job
from ravnest.server.scheduling.link_tests import NO_LINKS
from ravnest.server.scheduling.planner_messages import EstimateQuestion
from ravnest.server.scheduling.planner_process import EstimatingProcess
from ravnest.server.settings import PlanningLimits


def job(**changes: object) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
    )
    fields: dict[str, object] = {
        "model": model,
        "example_args": torch.rand(10, 64),
        "train_data": (torch.rand(200, 64), torch.randint(4, (200,))),
        "val_data": (torch.rand(50, 64), torch.randint(4, (50,))),
        "criterion": nn.CrossEntropyLoss(),
        "epochs": 3,
        "batch_size": 10,
        **changes,
    }
    return Job(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def request_() -> EstimateRequest:
    return pack_estimate(job())


def asked(request: EstimateRequest, *rams: float) -> JobEstimate:
    providers = tuple(
        (f"p{i}", offer(f"host-{i}", address=f"127.0.0.1:{9000 + i}", ram=ram))
        for i, ram in enumerate(rams)
    )
    return estimate_job(EstimateQuestion(request.spec, request.profiles, providers, {}, NO_LINKS))


def test_a_job_that_fits_has_its_figures(request_: EstimateRequest) -> None:
    found = asked(request_, 4.0, 4.0)
    assert found.fits
    assert found.starts_now
    assert not found.reason
    assert (found.epochs, found.updates) == (
        3,
        3 * sum(20 for _ in found.clusters) // len(found.clusters),
    )
    weights = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 4 + 4)
    data = 250 * (64 * 4 + 8)
    assert found.upload_bytes == weights + data
    assert found.result_bytes == weights
    assert found.training_seconds > 0
    assert found.start_seconds > 0
    for cluster in found.clusters:
        for stage in cluster.stages:
            assert 0 < stage.memory_bytes < stage.ram_bytes == 4e9
            assert stage.provider.startswith("host-")
    assert "samples/s" in found.plan


def test_a_pipeline_sends_its_activations_and_averages(request_: EstimateRequest) -> None:
    one = asked(
        request_.model_copy(update={"spec": request_.spec.model_copy(update={"clusters": 1})}), 4, 4
    )
    (cluster,) = one.clusters
    root, leaf = cluster.stages
    assert cluster.samples == 200
    assert cluster.updates == 60
    assert root.download_bytes > 250 * 64 * 4
    assert leaf.download_bytes > 250 * 8
    assert root.sent_bytes > 0
    assert leaf.sent_bytes == root.sent_bytes  # activations one way, their gradients the other
    two = asked(
        request_.model_copy(update={"spec": request_.spec.model_copy(update={"clusters": 2})}), 4, 4
    )
    assert [len(each.stages) for each in two.clusters] == [1, 1]
    assert sum(each.samples for each in two.clusters) == 200
    assert all(each.stages[0].sent_bytes == 3 * two.result_bytes for each in two.clusters)


def test_an_evaluation_needs_less_than_training(request_: EstimateRequest) -> None:
    found = asked(pack_estimate(job(epochs=0, train_data=None)), 4.0, 4.0)
    weights = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 4 + 4)
    assert (found.epochs, found.updates, found.result_bytes) == (0, 0, 0)
    assert found.upload_bytes == weights + 50 * (64 * 4 + 8)
    assert found.training_seconds > 0
    (cluster,) = found.clusters
    root, leaf = cluster.stages
    assert (root.sent_bytes > 0, leaf.sent_bytes) == (True, 0), "activations, and no gradients"
    spec = request_.spec.model_copy(update={"clusters": 1})
    (trained,) = asked(request_.model_copy(update={"spec": spec}), 4.0, 4.0).clusters
    needs = [sum(stage.memory_bytes for stage in each.stages) for each in (cluster, trained)]
    assert needs[0] < needs[1] - 3 * weights, "AdamW has two numbers, and there is a gradient"
    assert any("evaluation without training" in line for line in estimate_lines(found))


def test_a_job_that_does_not_fit_says_what_is_missing(request_: EstimateRequest) -> None:
    found = asked(request_, 0.0005, 0.0005)
    assert not found.fits
    assert "the model needs" in found.reason
    assert "What helps" in found.reason
    assert found.needed_bytes
    assert found.needed_bytes > (found.offered_bytes or 0) == 1e6
    assert [each.ram_bytes for each in found.providers] == [0.0005 * 1e9] * 2
    assert not asked(request_).fits


def test_sizes_are_those_of_the_packed_job(tmp_path: Path, request_: EstimateRequest) -> None:
    packed = pack_job(job(), tmp_path).spec
    assert request_.spec.training == packed.training
    assert request_.spec.train.samples == packed.train.samples
    for mine, theirs in (
        (request_.spec.train, packed.train),
        (request_.spec.validation, packed.validation),
    ):
        assert mine
        assert theirs
        assert 0 <= sum(f.artifact.size for f in theirs.inputs) - mine.inputs[0].artifact.size < 200
        assert 0 <= sum(f.artifact.size for f in theirs.labels) - mine.labels[0].artifact.size < 200


def test_a_job_with_wrong_settings_is_refused_before_it_is_sent() -> None:
    with pytest.raises(JobError, match="batch_size"):
        pack_estimate(job(batch_size=0))


@pytest.mark.parametrize(
    "profiles", ["", "{", "[]", "[1]", "[{}]", "[" * 100_000, '[{"units": [], "state": []}]']
)
def test_hostile_profiles_are_refused(request_: EstimateRequest, profiles: str) -> None:
    question = EstimateQuestion(request_.spec, profiles, (), {}, NO_LINKS)
    with pytest.raises(StageFormatError):
        estimate_job(question)


@dataclass
class InThisProcess:
    """Estimator without a child process."""

    questions: list[EstimateQuestion] = field(default_factory=list)
    gate: threading.Event | None = None
    began: threading.Event = field(default_factory=threading.Event)

    def estimate(self, question: EstimateQuestion) -> JobEstimate:
        self.questions.append(question)
        self.began.set()
        if self.gate is not None:
            self.gate.wait(30)
        return estimate_job(question)


@pytest.fixture
def estimator() -> InThisProcess:
    return InThisProcess()


@pytest.fixture
def served(tmp_path: Path, estimator: InThisProcess) -> Iterator[Case]:
    with opened(tmp_path, estimator=estimator) as case:
        yield case


def test_the_server_estimates_for_idle_providers_first(
    served: Case, estimator: InThisProcess, request_: EstimateRequest
) -> None:
    rita = served.requester()
    served.provider("alice")
    served.submit(rita)
    served.match()  # alice is at work now
    served.provider("bob", address="127.0.0.1:9001")
    found = JobEstimate(**rita.post("/api/estimates", request_))
    assert found.starts_now
    assert {each.name: each.idle for each in found.providers} == {"alice": False, "bob": True}
    assert {stage.provider for each in found.clusters for stage in each.stages} == {"bob"}
    wants_two = request_.model_copy(
        update={"spec": request_.spec.model_copy(update={"min_providers": 2})}
    )
    later = JobEstimate(**rita.post("/api/estimates", wants_two))
    assert later.fits
    assert not later.starts_now
    assert later.reason.startswith("it waits for providers that are at work now (1 of them): ")
    assert len(rita.get("/api/jobs")) == 1, "an estimate creates no job"
    assert len(estimator.questions) == 3


def test_only_requesters_get_estimates(served: Case, request_: EstimateRequest) -> None:
    served.provider().post("/api/estimates", request_, 403)


def test_what_cannot_be_estimated_is_one_sentence(served: Case, request_: EstimateRequest) -> None:
    wrong = request_.model_copy(update={"profiles": "nonsense"})
    answer = served.requester().post("/api/estimates", wrong, 422)
    assert answer["detail"].startswith("the job cannot be estimated: the profiles of the model are not")


def test_one_estimate_at_a_time(
    served: Case, estimator: InThisProcess, request_: EstimateRequest
) -> None:
    """Plans take seconds and threads: others are asked to try again."""
    estimator.gate = threading.Event()
    rita = served.requester()
    first = threading.Thread(target=rita.post, args=("/api/estimates", request_))
    first.start()
    try:
        assert estimator.began.wait(30)
        assert "another job" in rita.post("/api/estimates", request_, 429)["detail"]
    finally:
        estimator.gate.set()
        first.join(30)
    rita.post("/api/estimates", request_)


def test_requesters_take_turns(
    served: Case, estimator: InThisProcess, request_: EstimateRequest
) -> None:
    """One requester that asked all the time had all others refused."""
    estimator.gate = threading.Event()
    rita, rob = served.requester(), served.requester("rob")
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda each=each: answers.append(each.post("/api/estimates", request_)))
        for each in (rita, rob)
    ]
    threads[0].start()
    try:
        assert estimator.began.wait(30)
        threads[1].start()
        rita.post("/api/estimates", request_, 429)
    finally:
        estimator.gate.set()
        for each in threads:
            each.join(30)
    assert len(answers) == 2


def test_the_planner_process_estimates(request_: EstimateRequest) -> None:
    """The messages pass through their encoding, as between the two processes."""
    process = EstimatingProcess(PlanningLimits(), Wire())  # type: ignore[arg-type]
    providers = (("p0", offer("host-0")),)
    question = EstimateQuestion(request_.spec, request_.profiles, providers, {}, NO_LINKS)
    assert process.estimate(question) == estimate_job(question)
    broken = EstimateQuestion(request_.spec, "[]", providers, {}, NO_LINKS)
    with pytest.raises(StageFormatError, match="no list"):
        process.estimate(broken)
