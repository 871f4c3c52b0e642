"""Tensors that autograd saves are kept in a file: same bits, and errors of autograd are still raised."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ravnest.split import spill_file
from ravnest.split.spill_file import SpillFile, saved_tensors_on_disk

WIDTH = 256


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[3:, 5::7],
        lambda t: t[1:2].expand(300, -1),
        lambda t: t.view(torch.int32)[:, 1],
        lambda t: t.view(16, 16, 16, 16).to(memory_format=torch.channels_last),
    ],
    ids=["whole", "transposed", "strided", "expanded", "other type", "channels last"],
)
def test_a_tensor_is_read_as_it_was_written(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.randn(WIDTH, WIDTH))
    with SpillFile.temporary() as file:
        file.write(torch.randn(WIDTH))
        found = file.read(file.write(tensor))
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()
    assert found.dtype == tensor.dtype
    assert found.data_ptr() % 64 == tensor.data_ptr() % 64


def test_views_share_one_copy_until_the_storage_is_written_to() -> None:
    tensor = torch.randn(WIDTH, WIDTH)
    memory = io.BytesIO()
    file = SpillFile(memory)
    before = file.write(tensor), file.write(tensor[3:])
    assert len(memory.getvalue()) == tensor.nbytes
    old = tensor.clone()
    tensor.add_(1)
    after = file.write(tensor.t())
    assert torch.equal(file.read(before[1]), old[3:])
    assert torch.equal(file.read(after), tensor.t())


class ShortFile(io.BytesIO):
    """A file that takes and gives at most 1000 bytes at a time."""

    def write(self, data: memoryview) -> int:
        return super().write(data[:1000])

    def readinto(self, data: memoryview) -> int:
        return super().readinto(data[:1000])


def test_partial_writes_and_reads_are_continued() -> None:
    tensor = torch.randn(WIDTH, WIDTH)
    file = SpillFile(ShortFile())
    assert torch.equal(file.read(file.write(tensor)), tensor)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 10),
    )


def test_gradients_have_the_same_bits_and_activations_are_freed() -> None:
    x = torch.randn(8, 3, 32, 32)
    plain, spilled = _net(), _net()
    torch.manual_seed(1)
    plain(x).square().sum().backward()
    freed: list[StorageWeakRef] = []
    for layer in spilled[:-1]:
        layer.register_forward_hook(lambda *a: freed.append(StorageWeakRef(a[-1].untyped_storage())))
    torch.manual_seed(1)
    with saved_tensors_on_disk(spilled.parameters()):
        loss = spilled(x).square().sum()
        assert all(storage.expired() for storage in freed), "activations are still in memory"
        loss.backward()
    for a, b in zip(plain.parameters(), spilled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_tensor_that_was_changed_in_place_is_still_an_error() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with saved_tensors_on_disk([weight]):
        hidden = weight * 2
        result = hidden.square()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an in-place operation"):
            result.sum().backward()


def test_a_full_disk_leaves_activations_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.BytesIO):
        def write(self, _data: object) -> int:
            raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: FullDisk())
    assert spill_file.tempfile is tempfile
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with saved_tensors_on_disk([]):
        (weight * 2).square().sum().backward()
    assert torch.equal(weight.grad, 8 * weight.detach())
