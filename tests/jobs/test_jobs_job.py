"""Packing of a job into files and a message, and refusal of jobs that cannot be trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ravnest.errors import JobError, RavnestError
from ravnest.jobs.dataset_reader import Rows, SharedData
from ravnest.jobs.graph_loss import load_loss
from ravnest.jobs.job import Job
from ravnest.jobs.metrics import load_metrics
from ravnest.jobs.model import check_weights, read_units
from ravnest.jobs.packing import PackedJob, pack_job
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.plan import Plan
from ravnest.plan.planner import make_plan
from ravnest.plan.profile import ModelProfile
from ravnest.runtime.stage.validation_metrics import choose_metrics
from ravnest.schemas.jobs import BestRule, GraphLoss, JobSpec, NamedComponent, StoppingRule
from ravnest.server.assignments import needed_files
from ravnest.store.files import sha256_of
from ravnest.types import Address


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def _job(**changes: Any) -> Job:
    data = TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)))
    job = Job(_model(), (torch.randn(6, 4),), data, nn.CrossEntropyLoss(), torch.optim.SGD, {"lr": 0.1})
    return replace(job, **changes)


def _files_exist(packed: PackedJob) -> None:
    assert all(sha256_of(path) == digest for digest, path in packed.files.items())
    text = packed.spec.model_dump_json()
    assert JobSpec.model_validate_json(text) == packed.spec, "it round-trips through JSON"
    assert all(digest in text for digest in packed.files)


def test_groups_and_learning_rates_are_packed_as_data(tmp_path: Path) -> None:
    groups = [{"match": "*.bias|1.*", "weight_decay": 0.0}]
    warm_up = {"warmup_ratio": 0.1}
    job = _job(parameter_groups=groups, lr_scheduler="cosine", lr_scheduler_params=warm_up, epochs=10)
    packed = pack_job(job, tmp_path)
    _files_exist(packed)
    training = packed.spec.training
    assert [group.match for group in training.parameter_groups] == ["*.bias|1.*"]
    assert training.parameter_groups[0].params == {"weight_decay": 0.0}
    assert training.scheduler is not None
    assert (training.scheduler.name, training.scheduler.params["steps"]) == ("PiecewiseLR", [9, 81])
    assert not training.lr_step_on_epoch_change, "it counts updates"


class _Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, max_norm=1.0)
        self.output = nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.output(self.embed(words))


def test_a_model_that_writes_to_its_weights_is_not_trained_with_late_gradients(tmp_path: Path) -> None:
    data = TensorDataset(torch.randint(0, 9, (50,)), torch.randint(0, 3, (50,)))
    job = Job(_Bounded(), (torch.zeros(6, dtype=torch.long),), data, nn.CrossEntropyLoss())
    packed = pack_job(job, tmp_path / "auto")
    profile = read_units(packed.files[packed.spec.model.units.sha256]).profile
    assert profile.late_reason == "forward writes to the weight embed.weight"
    with pytest.raises(JobError, match="use 'sync' or 'auto'"):
        pack_job(replace(job, schedule="async"), tmp_path / "async")


def test_all_parts_of_a_job_are_packed(tmp_path: Path) -> None:
    job = _job(val_data=(torch.randn(9, 4), torch.randint(0, 3, (9,))), epochs=3, compression=True)
    before, rng = copy.deepcopy(job.model.state_dict()), torch.get_rng_state()
    reported: list[tuple[str, int, int]] = []
    packed = pack_job(job, tmp_path, lambda *step: reported.append(step))
    _files_exist(packed)
    spec = packed.spec
    assert (spec.name, spec.training.batch_size, spec.training.epochs) == ("Sequential", 6, 3)
    assert spec.training.compression == "fp16"
    assert spec.training.optimizer == NamedComponent(name="SGD", params={"lr": 0.1})
    assert isinstance(spec.training.loss, NamedComponent)
    assert spec.train.samples == 50
    assert spec.validation is not None
    assert spec.validation.samples == 9
    model = read_units(packed.files[spec.model.units.sha256])
    check_weights(model, packed.files[spec.model.weights.sha256])
    assert model.profile.batch_size == 6
    assert model.profile.optimizer_bytes_per_parameter_byte == 0.0, "SGD has no state"
    assert reported[0][0] == "capturing the model"
    assert ("packing train_data", 50, 50) in reported
    assert all(torch.equal(before[key], value) for key, value in job.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert job.model.training


def test_a_custom_loss_is_packed_as_a_graph(tmp_path: Path) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])

    def weighted(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, labels, weight=weights) + output.square().mean()

    packed = pack_job(_job(criterion=weighted), tmp_path)
    _files_exist(packed)
    loss = packed.spec.training.loss
    assert isinstance(loss, GraphLoss)
    loaded = load_loss(packed.files[loss.stage.sha256], packed.files[loss.weights.sha256])
    output, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 1])
    assert torch.equal(loaded(output, {"labels": labels}), weighted(output, labels))


def test_mixed_precision_is_packed_as_casts_of_model_and_loss(tmp_path: Path) -> None:
    def contrastive(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output @ output.t(), labels)

    packed = pack_job(_job(criterion=contrastive, precision="bf16"), tmp_path)
    units = read_units(packed.files[packed.spec.model.units.sha256]).units
    assert {entry.dtype for unit in units for entry in unit.state} == {torch.float32, torch.int64}
    assert torch.bfloat16 in {value.dtype for unit in units for value in unit.graphs["train"].inputs}
    loss = packed.spec.training.loss
    assert isinstance(loss, GraphLoss)
    loaded = load_loss(packed.files[loss.stage.sha256], packed.files[loss.weights.sha256])
    output, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = contrastive(output, labels)
    assert torch.equal(loaded(output, {"labels": labels}), expected)
    assert not torch.equal(expected, contrastive(output, labels)), "its product is in bfloat16"


def test_the_batch_size_comes_from_the_job_the_loader_or_the_example(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)))
    cases = {
        "loader": ({"train_data": DataLoader(data, batch_size=10, shuffle=True)}, 10),
        "given": ({"batch_size": 5}, 5),
        "one": ({"example_args": torch.randn(1, 4)}, 64),
        "single": ({"batch_size": 1, "model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))}, 1),
    }
    for name, (changes, expected) in cases.items():
        packed = pack_job(_job(**changes), tmp_path / name)
        assert packed.spec.training.batch_size == expected, name
        units = read_units(packed.files[packed.spec.model.units.sha256])
        assert units.profile.batch_size == max(expected, 2), "costs are measured for the real batch size"


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"logits": self.layer(x * mask) * scale, "rest": 3}


def test_inputs_by_name_and_an_output_of_several_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    samples = [{"x": torch.randn(4), "mask": torch.ones(4), "labels": i % 3, "id": i} for i in range(20)]
    job = Job(
        TwoInputs(),
        (torch.randn(4, 4),),
        samples,
        lambda output, labels: cross_entropy(output["logits"], labels),
        example_kwargs={"mask": torch.ones(4, 4), "scale": 2.0},
        shuffle=False,
    )
    packed = pack_job(job, tmp_path)
    pieces = [
        [Rows(packed.files[piece.artifact.sha256], 0, piece.rows) for piece in kind]
        for kind in (packed.spec.train.inputs, packed.spec.train.labels)
    ]
    shared = SharedData(*pieces)
    assert set(shared[3]) == {"x", "mask", "labels"}
    assert torch.equal(shared[3]["x"], samples[3]["x"])  # type: ignore[arg-type]


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(6, 3)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return (y, y * 2) if self.training else y


def _tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(50, *shape, dtype=dtype), torch.zeros(50, dtype=torch.long)


REFUSED: dict[str, tuple[Callable[[], Job], str]] = {
    "epochs": (lambda: _job(epochs=0), "epochs=0"),
    "batch size": (lambda: _job(batch_size=0), "batch_size must be"),
    "clusters": (lambda: _job(clusters=0), "clusters=0"),
    "compression": (lambda: _job(compression="zip"), "compression must be"),
    "robust mean": (lambda: _job(clusters=3, robust_mean="median"), "robust_mean='median'"),
    "robust mean of two": (
        lambda: _job(clusters=2, robust_mean="trimmed"),
        "needs 3 clusters or more, and the job has clusters=2",
    ),
    "robust mean of any": (lambda: _job(robust_mean="trimmed"), "Set clusters=3 or more"),
    "optimizer": (lambda: _job(optimizer=torch.optim.LBFGS), "a pipeline cannot do"),
    "optimizer parameters": (lambda: _job(optimizer_params={"speed": 1}), "does not accept"),
    "other shape": (lambda: _job(train_data=_tensors(5)), "train_data does not fit"),
    "other dtype": (lambda: _job(train_data=_tensors(4, dtype=torch.float64)), "float64"),
    "validation": (lambda: _job(val_data=_tensors(5)), "val_data does not fit"),
    "labels": (lambda: _job(train_data=(torch.zeros(50, 4), torch.zeros(50, 2))), "criterion fails"),
    "fixed batch": (lambda: _job(model=Fixed()), "use drop_last=True"),
    "last batch": (lambda: _job(batch_size=7), "train_data has a batch of 1 samples"),
    "structure": (
        lambda: _job(
            model=Auxiliary(),
            criterion=lambda output, labels: cross_entropy(output[0], labels),
            val_data=_tensors(4),
        ),
        "another structure in evaluation",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_job_that_cannot_be_trained_is_refused_before_upload(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(JobError, match=message):
        pack_job(make(), tmp_path)


def test_a_robust_mean_reaches_the_server(tmp_path: Path) -> None:
    spec = pack_job(_job(clusters=3, robust_mean="trimmed"), tmp_path).spec
    assert (spec.training.robust_mean, spec.clusters) == ("trimmed", 3)
    with pytest.raises(ValueError, match="clusters=3 or more"):
        JobSpec.model_validate_json(spec.model_dump_json().replace('"clusters":3', '"clusters":2'))


def test_a_model_with_a_hook_that_stages_would_not_run_is_refused(tmp_path: Path) -> None:
    job = _job()
    job.model[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index,union-attr,operator]
    with pytest.raises(RavnestError, match=r"the parameter 0\.weight has a hook"):
        pack_job(job, tmp_path)


def _last(label: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data of which only the last sample has this label."""
    labels = torch.randint(0, 3, (50,))
    labels[49] = label
    return torch.randn(50, 4), labels


def _flattened(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, labels.flatten())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"train_data": _last(3)},
            "sample 49 of train_data has the label 3, but .* 3 classes, .* 0 to 2",
        ),
        ({"train_data": _last(-1)}, "sample 49 of train_data has the label -1, but the model's output"),
        ({"val_data": _last(7)}, "sample 49 of val_data has the label 7"),
        ({"train_data": _last(3), "criterion": cross_entropy}, "sample 49 .* has the label 3"),
        ({"train_data": _last(9), "criterion": _flattened}, "label 9, and with it the criterion fails"),
        ({"train_data": (torch.randn(6, 4), torch.tensor([1, 2, 3] * 2))}, "subtract 1 from all labels"),
    ],
)
def test_every_label_is_checked(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(JobError, match=expected):
        pack_job(_job(shuffle=False, batch_size=6, **changes), tmp_path)


def test_an_ignored_label_is_no_class(tmp_path: Path) -> None:
    pack_job(_job(train_data=_last(-100)), tmp_path / "default")
    pack_job(_job(train_data=_last(7), criterion=nn.CrossEntropyLoss(ignore_index=7)), tmp_path / "own")


def test_every_value_is_checked(tmp_path: Path) -> None:
    inputs, labels = _last(0)
    for value, kind in ((torch.nan, "NaN"), (torch.inf, "infinite")):
        inputs[31, 2] = value
        job = _job(train_data=(inputs, labels))
        with pytest.raises(JobError, match=f"of sample 31 of train_data has values that are {kind}"):
            pack_job(job, tmp_path / kind)
    pack_job(replace(job, check_values=False), tmp_path / "allowed")
    targets = torch.randn(50, 3)
    targets[4] = torch.nan
    wrong = _job(train_data=(torch.randn(50, 4), targets), criterion=nn.MSELoss())
    with pytest.raises(JobError, match="the target of sample 4 of train_data has values that are NaN"):
        pack_job(wrong, tmp_path / "target")

    def without_missing(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((output - labels.nan_to_num()) ** 2).mean()

    pack_job(replace(wrong, criterion=without_missing), tmp_path / "missing")


def test_a_misspelt_field_is_suggested() -> None:
    job = _job()
    with pytest.raises(JobError, match="Job has no keyword 'batchsize': did you mean batch_size"):
        Job(job.model, job.example_args, job.train_data, job.criterion, batchsize=3)  # type: ignore[call-arg]


def _far(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) - labels).abs().float()


def test_metrics_are_packed_as_names_and_graphs(tmp_path: Path) -> None:
    labels = torch.randint(0, 3, (9,))
    validation = (torch.randn(9, 4), labels)
    given = {"accuracy": "accuracy", "f1": {"name": "f1", "average": "micro"}, "far": _far}
    rules = {"early_stopping": {"metric": "loss"}, "keep_best": {"metric": "far", "mode": "min"}}
    packed = pack_job(_job(metrics=given, val_data=validation, **rules), tmp_path)
    training = packed.spec.training
    assert training.early_stopping == StoppingRule(metric="loss", mode="min", patience=3, min_delta=0.0)
    assert training.keep_best == BestRule(metric="far", mode="min")
    _files_exist(packed)
    specs = packed.spec.training.metrics
    assert [spec.label for spec in specs] == ["accuracy", "f1", "far", "loss"]
    assert specs[1].metric == NamedComponent(name="f1", params={"average": "micro"})
    graph = packed.spec.training.graph_metrics[2]
    assert {graph.stage.sha256, graph.weights.sha256} <= {
        file.sha256 for file in needed_files(packed.spec)
    }
    stored = {number: (packed.files[graph.stage.sha256], packed.files[graph.weights.sha256])
              for number, graph in packed.spec.training.graph_metrics.items()}  # fmt: skip
    loaded = choose_metrics(load_metrics(specs, stored.__getitem__))
    output = torch.randn(9, 3)
    metric = loaded[2].make()
    metric.add(output, {"labels": labels})
    assert metric.value() == pytest.approx(_far(output, labels).mean().item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": ["accuracy"], "val_data": None}, "give val_data, or omit them"),
        ({"lr_scheduler": "plateau", "val_data": None}, "give val_data, or omit them"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "not both"),
        ({"ema": 1.0}, "ema must be the decay of a moving average"),
        ({"optimizer_state": "int4"}, "optimizer_state must be 'float32' or 'int8', not 'int4'"),
        ({"optimizer_state": "int8", "average_optim": True}, "average_optim=True needs the optimizer's"),
        ({"keep_best": "acc"}, "keep_best names the metric 'acc', which is not one of "),
        ({"early_stopping": {"metric": "loss", "patience": 0}}, "patience of early_stopping must be"),
        ({"metrics": ["acc"]}, "no metric is called 'acc'"),
        ({"metrics": ["mae"]}, "the metric 'mae' cannot be computed: the model's output of shape"),
        ({"metrics": [lambda output, labels: 3]}, "it must return a tensor, not a int"),
        ({"metrics": {"a": lambda output, labels: output[7]}}, "the metric 'a' fails on the model's"),
    ],
)
def test_wrong_metrics_are_found_before_upload(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    validation = (torch.randn(9, 4), torch.randint(0, 3, (9,)))
    with pytest.raises(JobError, match=message):
        pack_job(_job(**({"val_data": validation} | changes)), tmp_path)


def _contrastive(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compare each sample with the mean of its batch."""
    return cross_entropy(output - output.mean(0), labels)


def _splittable(**changes: Any) -> Job:
    torch.manual_seed(0)
    return _job(model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), **changes)


def _packed_profile(job: Job, folder: Path) -> ModelProfile:
    packed = pack_job(job, folder)
    _files_exist(packed)
    return read_units(packed.files[packed.spec.model.units.sha256]).profile


def test_a_loss_that_couples_samples_is_planned_with_whole_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = _packed_profile(_splittable(criterion=_contrastive), tmp_path)
    assert profile.smallest_rows is None
    assert "it compares samples with each other" in profile.unsplit_reason
    assert profile.unsplit_reason in caplog.text, "told before the upload"
    nodes = [NodeConfig(n, Address("127.0.0.1", 8080 + n), 4, 100, 10) for n in range(2)]
    plan = make_plan(profile, nodes)
    assert isinstance(plan, Plan)
    assert plan.schedule == "async"
    assert profile.unsplit_reason in plan.clusters[0].split_reason


@pytest.mark.parametrize(
    "criterion",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=2), nn.CrossEntropyLoss(reduction="sum")],
)
def test_losses_that_are_means_or_sums_leave_batches_splittable(
    criterion: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _packed_profile(_splittable(criterion=criterion), tmp_path).smallest_rows == 1
    assert not caplog.records


def _one_cycle(each_epoch: bool, **params: int) -> Job:
    """50 samples in batches of 6, twice: 18 updates."""
    return _job(
        batch_size=6,
        epochs=2,
        lr_scheduler=torch.optim.lr_scheduler.OneCycleLR,
        lr_scheduler_params={"max_lr": 0.1, **params},
        lr_step_on_epoch_change=each_epoch,
    )


@pytest.mark.parametrize("params", [{"total_steps": 17}, {"epochs": 2, "steps_per_epoch": 8}])
def test_a_cycle_that_ends_before_the_training_is_refused(
    params: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=r"given 1[67] steps, and the job makes 18, after .*=18"):
        pack_job(_one_cycle(False, **params), tmp_path)


def test_a_cycle_that_hardly_begins_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack_job(_one_cycle(False, total_steps=18), tmp_path / "right")
    assert not caplog.records
    pack_job(_one_cycle(True, total_steps=18), tmp_path / "wrong")
    assert "given 18 steps, and the job makes 2, once per epoch" in caplog.text
    assert "lr_step_on_epoch_change=False and total_steps=18" in caplog.text
