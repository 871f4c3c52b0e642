"""Datasets and training arguments of Hugging Face become jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import libraries
from torch import nn
from torch.utils.data import DataLoader

from ravnest.errors import JobError
from ravnest.jobs.dataset_reader import Rows, SharedData
from ravnest.jobs.hugging_face import samples_of
from ravnest.jobs.job import Job
from ravnest.jobs.packing import pack_job


class Table:
    """What the library ``datasets`` shows of a dataset: columns, features, and rows as mappings."""

    def __init__(self, **columns: list[Any]) -> None:
        self.features = dict.fromkeys(columns)
        self.column_names = list(columns)
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


class Classifier(nn.Module):
    """Bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        words = self.embed(input_ids) * attention_mask[..., None]
        return self.head(self.norm(words.mean(1)))


def table(rows: int = 12) -> Table:
    ids = [[(row + place) % 16 for place in range(5)] for row in range(rows)]
    return Table(
        text=[f"sentence {row}" for row in range(rows)],
        input_ids=ids,
        attention_mask=[[1] * 5 for _ in ids],
        label=[row % 2 for row in range(rows)],
    )


EXAMPLE = {"input_ids": torch.zeros(4, 5, dtype=torch.long), "attention_mask": torch.ones(4, 5).long()}


def test_a_dataset_of_lists_is_packed(tmp_path: Path) -> None:
    job = Job(
        model=Classifier(),
        example_kwargs=EXAMPLE,
        train_data=table(),
        val_data=table(4),
        criterion=nn.CrossEntropyLoss(),
        shuffle=False,
    )
    spec = pack_job(job, tmp_path).spec
    assert (spec.train.samples, spec.training.batch_size) == (12, 4)
    assert spec.validation is not None
    files = [sorted((tmp_path / "train").glob(f"{kind}_*"))[0] for kind in ("inputs", "labels")]
    inputs, labels = ([Rows(path, 0, 12)] for path in files)
    first = SharedData(inputs, labels)[1]
    assert first["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert int(first["labels"]) == 1


def test_other_datasets_are_not_wrapped() -> None:
    data = [(torch.rand(2), 1)]
    assert samples_of(data) is data


@pytest.mark.parametrize("missing", ["train_data", "criterion", "example_kwargs"])
def test_a_job_without_its_parts_is_refused(missing: str, tmp_path: Path) -> None:
    job = Job(
        model=Classifier(),
        example_kwargs=EXAMPLE,
        train_data=table(),
        criterion=nn.CrossEntropyLoss(),
    )
    empty: Any = {} if missing == "example_kwargs" else None
    with pytest.raises(JobError, match=r"criterion must be|the job has no"):
        pack_job(replace(job, **{missing: empty}), tmp_path)


def arguments(folder: Path, **changes: Any) -> Any:
    transformers, _ = libraries()
    given = {
        "output_dir": str(folder),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "seed": 7,
        "report_to": "none",
        "use_cpu": True,
    }
    return transformers.TrainingArguments(**(given | changes))


def test_training_arguments_become_the_fields_of_a_job(tmp_path: Path) -> None:
    job = Job.from_training_arguments(
        arguments(tmp_path / "out"),
        model=Classifier(),
        train_dataset=table(),
        eval_dataset=table(4),
        criterion=nn.CrossEntropyLoss(),
        example_kwargs=EXAMPLE,
    )
    assert (job.epochs, job.batch_size, job.update_frequency, job.seed) == (3, 4, 2, 7)
    assert job.precision is None
    assert (job.clip_grad_norm, job.lr_scheduler) == (0.5, "cosine")
    assert (job.optimizer, job.optimizer_params["lr"]) == (torch.optim.AdamW, 3e-4)
    assert list(job.parameter_groups) == [{"match": "*bias|*norm*", "weight_decay": 0.0}]
    training = pack_job(job, tmp_path / "packed").spec.training
    assert training.scheduler is not None
    assert training.scheduler.params["steps"][0] == 2, "the warm-up"


def test_arguments_that_a_job_cannot_follow_are_refused(tmp_path: Path) -> None:
    for changes, says in (
        ({"max_steps": 5}, "counts epochs"),
        ({"num_train_epochs": 0.5}, "whole number"),
        ({"optim": "adafactor"}, "none of"),
    ):
        with pytest.raises(JobError, match=says):
            Job.from_training_arguments(
                arguments(tmp_path, **changes), model=Classifier(), train_dataset=table()
            )


def test_a_collator_becomes_that_of_a_loader(tmp_path: Path) -> None:
    job = Job.from_training_arguments(
        arguments(tmp_path), model=Classifier(), train_dataset=table(), data_collator=list
    )
    assert isinstance(job.train_data, DataLoader)
    assert (job.train_data.batch_size, job.train_data.collate_fn) == (4, list)
    own = Job.from_training_arguments(
        arguments(tmp_path, bf16=True, use_cpu=True),
        model=Classifier(),
        train_dataset=table(),
        optimizer=torch.optim.SGD,
    )
    assert own.precision == "bf16"
    assert (own.optimizer, dict(own.optimizer_params)) == (torch.optim.SGD, {})
