"""The allow-list guarantees that a stage only computes."""

from __future__ import annotations

import operator
from importlib.resources import files

import pytest
import torch

from ravnest.errors import OperatorError, RavnestError
from ravnest.split import split
from ravnest.split.operator_guards import executable
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
    "aten::to.prim_Device",
    "aten::mul.left_t",
    "aten::add.str",
    "aten::pow.int",
    "aten::_reshape_alias.default",
    "aten::_unsafe_view.default",
    "aten::native_batch_norm.default",
    "aten::_native_batch_norm_legit.default",
    "aten::_native_batch_norm_legit.no_stats",
    "aten::_native_batch_norm_legit_no_training.default",
    "aten::_batch_norm_with_update.default",
    "aten::_ctc_loss.default",
    "aten::_embedding_bag.default",
    "aten::segment_reduce.default",
    "aten::_weight_norm_interface.default",
    "aten::_stack.default",
    "aten::range.step",
    "aten::special_hermite_polynomial_h.n_scalar",
    "aten::lcm.default",
    "aten::lcm_.default",
    "aten::gcd.default",
    "aten::polygamma.default",
    "aten::mvlgamma_.default",
    "aten::igamma.default",
    "aten::special_zeta.default",
    "aten::special_bessel_j0.default",
    "aten::linalg_eig.default",
    "aten::linalg_tensorinv.default",
    "aten::fft_hfft.default",
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


def groups() -> dict[str, list[str]]:
    """Return the groups of the list: title and operators."""
    text = files("ravnest.split").joinpath("operators.txt").read_text()
    _introduction, *parts = text.split("\n\n")
    return {part.splitlines()[0]: part.strip().splitlines()[1:] for part in parts}


def test_every_operator_has_a_group() -> None:
    found = groups()
    assert all(title.startswith("# ") and names for title, names in found.items())
    names = [name for names in found.values() for name in names]
    assert len(names) == len(set(names)) == len(allowed_aten())
    for listed in found.values():
        assert listed == sorted(listed, key=lambda name: (name.strip("_"), name))


NEEDED = {
    "special": "digamma entr erf erfc erfinv exp2 expit expm1 gammaln i0 i0e log1p log_ndtr log_softmax "
    "logit logsumexp ndtr round sinc softmax xlog1py xlogy",
    "linalg": "cholesky cholesky_ex cross det diagonal eigh eigvalsh inv inv_ex lstsq matmul matrix_exp "
    "matrix_norm matrix_power multi_dot norm pinv qr slogdet solve solve_ex solve_triangular svd "
    "svdvals vecdot vector_norm",
}
"""Functions that layers, losses, distributions and parametrizations of torch use, and their aliases."""


@pytest.mark.parametrize("family", NEEDED)
def test_a_family_has_what_models_need_and_no_more(family: str) -> None:
    """Each operator is one more kernel that a job can attack: an addition needs a model that uses it."""
    listed = {name for name in allowed_aten() if name.startswith(f"{family}_")}
    assert listed == {f"{family}_{name}" for name in NEEDED[family].split()}


def test_a_model_with_an_operator_that_is_not_listed_is_refused_with_its_name() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.lcm(x, x)

    with pytest.raises(RavnestError, match=r"aten::lcm"):
        split(Model(), torch.ones(4, 3, dtype=torch.int64), stages=1)


def test_the_list_has_no_forbidden_family() -> None:
    families = ("sparse", "quantize", "mkldnn", "cudnn", "miopen", "_backward", "nested", "foreach")
    families += ("unsafe", "_alias", "_strided_", "resize", "native_", "_forward", "fused", "_out")
    assert not [name for name in allowed_aten() if any(family in name for family in families)]


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


@pytest.mark.parametrize("name", ["empty.memory_format", "new_empty.default", "empty_like.default"])
def test_uninitialised_memory_is_zeroed(name: str) -> None:
    """An untrusted graph must not read previous contents of this process's memory."""
    arguments = {
        "empty.memory_format": ([1000],),
        "new_empty.default": (torch.ones(1), [1000]),
        "empty_like.default": (torch.ones(1000),),
    }[name]
    for _ in range(20):
        torch.full((1000,), 7.0)  # leaves a freed block with other values
        assert not executable(f"aten::{name}", "x")(*arguments).any()
