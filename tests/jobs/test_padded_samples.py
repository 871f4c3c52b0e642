"""Samples of different lengths: stored padded, cropped to the batches of the user's ``collate_fn``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from ravnest.errors import DataError, JobError
from ravnest.jobs.dataset_reader import Rows, SharedData, collate_samples, crop_batch
from ravnest.jobs.dataset_writer import PackedData, pack_data, with_padding
from ravnest.jobs.graph_loss import load_loss
from ravnest.jobs.job import Job
from ravnest.jobs.model import read_units
from ravnest.jobs.packing import pack_job
from ravnest.jobs.padded_samples import largest_batch, varying_dims
from ravnest.split import Chain
from ravnest.split.module import StageModule

Batch = dict[str, torch.Tensor]


def sequences(count: int = 23, longest: int = 9, seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    lengths = [longest, *torch.randint(2, longest, (count - 1,), generator=made).tolist()]
    return [torch.randint(0, 12, (length,), generator=made) for length in lengths]


def padded(samples: list[torch.Tensor], side: str = "right") -> Batch:
    ids = pad_sequence(samples, batch_first=True, padding_side=side)
    mask = pad_sequence([torch.ones_like(each) for each in samples], True, padding_side=side)
    targets = [each.flip(0) for each in samples]
    return {
        "ids": ids,
        "mask": mask,
        "labels": pad_sequence(targets, True, -100.0, padding_side=side),
    }


def left_padded(samples: list[torch.Tensor]) -> Batch:
    return padded(samples, "left")


def to_eight(samples: list[torch.Tensor]) -> Batch:
    """Pad to a multiple of 8."""
    batch = padded(samples)
    missing = -batch["ids"].shape[1] % 8
    return {
        name: functional.pad(t, (0, missing), value=-100 if name == "labels" else 0)
        for name, t in batch.items()
    }


def images(samples: list[torch.Tensor]) -> Batch:
    """Pad made-up images in both dimensions, at different ends."""
    shapes = [(len(each), 12 - len(each)) for each in samples]
    rows, columns = max(r for r, _ in shapes), max(c for _, c in shapes)
    made = [
        functional.pad(torch.full((1, r, c), float(r)), (0, columns - c, rows - r, 0)) for r, c in shapes
    ]
    return {
        "ids": torch.stack(made),
        "mask": torch.ones(len(samples), 1),
        "labels": torch.ones(len(samples)),
    }


def loader(collate: Callable[..., Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(sequences(), **({"batch_size": 4, "collate_fn": collate} | options))  # type: ignore[arg-type]


def pack(given: object, folder: Path, names: tuple[str, ...] = ("ids", "mask")) -> PackedData:
    return pack_data(given, names, folder, seed=0, shuffle=False, piece_bytes=2000)


def shared(packed: PackedData) -> SharedData:
    return SharedData(
        [Rows(path, 0, rows) for path, rows in packed.inputs],
        [Rows(path, 0, rows) for path, rows in packed.labels],
    )


@pytest.mark.parametrize("collate", [padded, left_padded, to_eight])
def test_any_batch_is_that_of_the_collate_fn(tmp_path: Path, collate: Callable[..., Batch]) -> None:
    packed = pack(loader(collate), tmp_path)
    assert len(packed.inputs) > 1
    data, samples = shared(packed), sequences()
    made = torch.Generator().manual_seed(3)
    for size in (1, 2, 3, 7, 23):
        chosen = torch.randperm(len(samples), generator=made)[:size].tolist()
        found = collate_samples([data[index] for index in chosen])
        expected = collate([samples[index] for index in chosen])
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor)
            assert found[name].is_contiguous()


def test_two_dimensions_vary_and_are_padded_at_different_ends(tmp_path: Path) -> None:
    samples = [torch.zeros(rows) for rows in (9, 3, 5, 7, 3, 9, 4)]
    data = shared(pack(DataLoader(samples, 2, collate_fn=images), tmp_path))  # type: ignore[arg-type]
    found = collate_samples([data[2], data[6]])["ids"]
    assert torch.equal(found, images([samples[2], samples[6]])["ids"])
    assert found.shape == (2, 1, 5, 8)


def test_samples_of_one_size_are_stored_without_windows(tmp_path: Path) -> None:
    rows = [torch.arange(4) + k for k in range(6)]
    packed = pack(DataLoader(rows, 2, collate_fn=padded), tmp_path)  # type: ignore[arg-type]
    assert set(shared(packed)[0]) == {"ids", "mask", "labels"}


def mixed(samples: list[torch.Tensor]) -> Batch:
    batch = padded(samples)
    return batch | {"ids": batch["ids"] + batch["ids"].roll(1, 0)}


def failing(samples: list[torch.Tensor]) -> Batch:
    if len(samples) > 1:
        raise KeyError("token_type_ids")
    return padded(samples)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (loader(mixed), "does more than pad: 'ids'"),
        (loader(failing), "fails for a batch of 2 samples: KeyError"),
        (
            loader(
                lambda samples: {"ids": torch.ones(1), "mask": torch.ones(1), "labels": torch.ones(1)}
            ),
            "one row",
        ),
        (loader(lambda samples: torch.ones(len(samples))), "the batches that the collate_fn"),
        (
            DataLoader(
                sequences(),  # type: ignore[arg-type]
                batch_sampler=type("Bucket", (BatchSampler,), {})(
                    SequentialSampler(range(23)), 4, False
                ),
                collate_fn=padded,
            ),
            "custom sampler",
        ),
    ],
    ids=["mixed", "failing", "no rows", "tensor", "batch sampler"],
)
def test_what_providers_cannot_do_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        pack(given, tmp_path)


@pytest.mark.parametrize(
    "windows",
    [
        torch.tensor([[[0, 6]], [[0, 2]]]),
        torch.tensor([[[-1, 3]], [[0, 2]]]),
        torch.tensor([[[3, 1]], [[4, 2]]]),
        torch.tensor([[0, 3], [0, 2]]),
        torch.tensor([[[0.0, 3.0]], [[0.0, 2.0]]]),
    ],
)
def test_forged_windows_are_refused(windows: torch.Tensor) -> None:
    with pytest.raises(DataError, match="the windows of 'x'"):
        crop_batch({"x": torch.ones(2, 5), "x.window": windows})


def test_the_largest_batch_of_all_datasets() -> None:
    train = with_padding(loader(padded), ("ids", "mask"), "train_data")
    val = with_padding(
        DataLoader(sequences(3, 14), 2, collate_fn=padded),
        ("ids", "mask"),
        "val_data",  # type: ignore[arg-type]
    )
    assert train is not None
    assert val is not None
    assert varying_dims([train, val]) == {"ids": [1], "mask": [1], "labels": [1]}
    assert {name: list(t.shape) for name, t in largest_batch([train, val], 4).items()} == {
        "ids": [4, 14],
        "mask": [4, 14],
        "labels": [4, 14],
    }


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.layer = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, _ = self.layer(self.tokens(ids) * mask[..., None])
        return self.head(x + (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None])


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def job(model: nn.Module, **options: Any) -> Job:
    example = padded(sequences()[:4])
    given = {"train_data": loader(padded), "criterion": token_loss} | options
    return Job(model=model, example_args=(example["ids"], example["mask"]), **given)


def test_a_job_trains_batches_of_different_lengths_as_one_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tagger()
    val = DataLoader(sequences(5, 11, 1), 2, collate_fn=padded)  # type: ignore[arg-type]
    found = pack_job(job(copy.deepcopy(model), shuffle=False, val_data=val), tmp_path)
    spec, files = found.spec, found.files
    units = read_units(files[spec.model.units.sha256])
    tensors = model.state_dict()
    stages = units.stages([len(units.units) // 2])
    chain = Chain(StageModule(s, {e.key: tensors[e.key].clone() for e in s.state}) for s in stages)
    symbols = stages[0].graphs["train"].symbols
    assert [str(each) for each in symbols] == ["1 to any", "1 to 11"]
    criterion = load_loss(
        files[spec.training.loss.stage.sha256], files[spec.training.loss.weights.sha256]
    )  # type: ignore[union-attr]
    data = SharedData(
        [Rows(files[f.artifact.sha256], 0, f.rows) for f in spec.train.inputs],
        [Rows(files[f.artifact.sha256], 0, f.rows) for f in spec.train.labels],
    )
    lengths = set()
    theirs = DataLoader(data, spec.training.batch_size, collate_fn=collate_samples)
    for batch, own in zip(theirs, loader(padded), strict=True):
        lengths.add(batch["ids"].shape[1])
        loss = token_loss(model(own["ids"], own["mask"]), own["labels"])
        model.zero_grad()
        loss.backward()
        output = chain(batch["ids"], batch["mask"])
        same = criterion(output, batch["labels"])
        chain.backward(same)
        assert torch.equal(loss, same)
        parts = dict(chain.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert torch.equal(parts[name].grad, parameter.grad)  # type: ignore[arg-type]
                for each in (parts[name], parameter):
                    each.sub_(each.grad, alpha=0.1)  # type: ignore[arg-type]
                    each.grad = None
    assert len(lengths) > 2


class Positions(Tagger):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] < 4:
            return super().forward(ids, mask) * 2
        return super().forward(ids, mask)


def test_lengths_for_which_forward_decides_otherwise_are_refused_before_upload(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="train_data has a sample with size 2 in dimension 1 of ids"):
        pack_job(job(Positions()), tmp_path)
