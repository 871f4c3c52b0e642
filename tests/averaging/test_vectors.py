"""Conversion of the tensors of a ring to one vector and back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ravnest.averaging.vectors import copy_like, flatten, is_finite, views

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=5)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


def restored(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: copy_like(part, like[name]) for name, part in views(vector, like).items()}


@given(SHAPES, DTYPES, st.randoms(use_true_random=False))
def test_values_and_layout_come_back(
    shapes: list[list[int]], dtype: torch.dtype, random: object
) -> None:
    tensors: dict[str, Tensor] = {}
    for number, shape in enumerate(shapes):
        order = list(range(len(shape)))
        random.shuffle(order)  # type: ignore[attr-defined]
        tensors[str(number)] = torch.randn(shape).to(dtype).permute(order)
    back = restored(flatten(tensors), tensors)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
        if tensor.numel() > 1:
            assert back[name].stride() == tensor.stride()
        assert not tensor.numel() or back[name].data_ptr() != tensor.data_ptr()


def test_strides_are_kept() -> None:
    weight = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    back = restored(flatten({"w": weight}), {"w": weight})["w"]
    assert back.stride() == weight.stride()
    assert torch.equal(back, weight)


def test_members_with_other_strides_have_the_same_vector() -> None:
    weight = torch.randn(3, 4, 5, 6)
    assert torch.equal(
        flatten({"w": weight}), flatten({"w": weight.to(memory_format=torch.channels_last)})
    )


def test_tensors_with_gaps_and_overlaps() -> None:
    tensors = {"gaps": torch.randn(6, 6)[::2, 1::3], "same": torch.randn(1).expand(4)}
    back = restored(flatten(tensors), tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_the_vector_is_a_copy_and_needs_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    flat = flatten({"w": weight})
    with torch.no_grad():
        weight.zero_()
    assert flat.tolist() == [1, 1, 1]
    assert not flat.requires_grad
    assert not restored(flat, {"w": weight})["w"].requires_grad


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((), torch.float32),
        ((torch.float16, torch.bfloat16), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
def test_a_vector_is_as_wide_as_its_widest_tensor(
    dtypes: tuple[torch.dtype, ...], expected: torch.dtype
) -> None:
    tensors = {str(number): torch.ones(2, dtype=dtype) for number, dtype in enumerate(dtypes)}
    assert flatten(tensors).dtype == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70_000, 199_999])
def test_nan_and_infinities_are_found(value: float, place: int) -> None:
    vector = torch.randn(200_000)
    assert is_finite(vector)
    vector[place] = value
    assert not is_finite(vector)


def test_large_values_are_finite() -> None:
    assert is_finite(torch.full((200_000,), 3e38))
    assert is_finite(torch.empty(0))
