"""The allow-list guarantees that a stage only computes."""

from __future__ import annotations

import operator
from importlib.resources import files

import pytest
import torch

from ravnest.errors import OperatorError
from ravnest.split.operators import allowed_aten, name_of, resolve

FORBIDDEN = [
    "aten::from_file.default",
    "aten::set_.source_Storage",
    "aten::set_.source_Tensor",
    "aten::resize_.default",
    "aten::data.default",
    "aten::record_stream.default",
    "aten::_print.default",
    "aten::add.out",
    "aten::sort.values_stable_out",
    "aten::convolution_backward.default",
    "aten::to_sparse.default",
    "aten::__class__.default",
    "aten::add.__class__",
    "aten::add",
    "aten::.default",
    "prims::add.default",
    "torch::load.default",
    "python::eval",
    "python::__import__",
    "math::factorial",
    "os::system",
    "",
]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_operators_are_rejected(name: str) -> None:
    with pytest.raises(OperatorError):
        resolve(name)


def test_every_listed_operator_exists() -> None:
    missing = [name for name in allowed_aten() if not hasattr(torch.ops.aten, name)]
    assert not missing


def test_the_list_is_sorted_and_has_no_forbidden_family() -> None:
    text = files("ravnest.split").joinpath("operators.txt").read_text()
    names = [line for line in text.splitlines() if not line.startswith("#")]
    assert names == sorted(set(names), key=lambda name: (name.strip("_"), name))
    families = ("sparse", "quantize", "mkldnn", "cudnn", "miopen", "_backward", "nested", "foreach")
    assert not [name for name in names if any(family in name for family in families)]


@pytest.mark.parametrize(
    "target",
    [
        torch.ops.aten.linear.default,
        torch.ops.aten.to.dtype_layout,
        torch.ops.aten.add_.Tensor,
        torch.ops.aten.sym_size.int,
        operator.floordiv,
        operator.getitem,
        torch.sym_max,
        round,
    ],
)
def test_a_name_resolves_to_its_operator(target: object) -> None:
    assert resolve(name_of(target)) is target


@pytest.mark.parametrize("name", ["empty.memory_format", "new_empty.default", "empty_strided.default"])
def test_uninitialised_memory_is_zeroed(name: str) -> None:
    """An untrusted graph must not read previous contents of this process's memory."""
    arguments = {
        "empty.memory_format": ([1000],),
        "new_empty.default": (torch.ones(1), [1000]),
        "empty_strided.default": ([1000], [1]),
    }[name]
    for _ in range(20):
        torch.full((1000,), 7.0)  # leaves a freed block with other values
        assert not resolve(f"aten::{name}")(*arguments).any()
