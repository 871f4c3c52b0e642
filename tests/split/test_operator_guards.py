"""Attacks with operators that trust their arguments: each is refused before the operator is called.

Every call here read or wrote outside of its tensors, or ended the process, when it was made directly.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from ravnest.errors import OperandError, OperatorError
from ravnest.split.graph import Operation, OutputSpec, Ref, StageGraph, ValueSpec
from ravnest.split.operator_guards import GUARDS, executable
from ravnest.split.operators import all_targets, allowed_aten
from ravnest.split.program import Program

LOWEST = torch.iinfo(torch.int64).min


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def ones(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes)


def lstm(**changed: Any) -> tuple[Any, ...]:
    """Return the arguments of a valid LSTM with two directions, with changes."""
    weights = [torch.randn(16, 3), torch.randn(16, 4), torch.randn(16), torch.randn(16)] * 2
    arguments = {
        "input": torch.randn(5, 2, 3),
        "hx": [torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)],
        "params": weights,
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": False,
        "bidirectional": True,
        "batch_first": False,
    }
    return tuple((arguments | changed).values())


def bag(indices: torch.Tensor, offsets: torch.Tensor, last: bool = False) -> tuple[Any, ...]:
    return torch.randn(5, 3), indices, offsets, False, 0, False, None, last


def half(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.bfloat16)


def sampled(place: float) -> tuple[Any, ...]:
    return ones(2, 3, 33, 16), torch.full((2, 8, 16, 2), place), 0, 2, False


FLAGS = (False, False, True)
LOG = torch.randn(6, 2, 4).log_softmax(2)
LABELS = torch.ones(2, 3, dtype=torch.int64)

ATTACKS: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("lowest integer by -1", "div.Tensor_mode", (ints(LOWEST), ints(-1)), "by -1"),
    ("in place", "div_.Tensor_mode", (ints(LOWEST), ints(-1)), "by -1"),
    ("by a number", "div.Scalar_mode", (ints(LOWEST), -1), "by -1"),
    ("floor_divide", "floor_divide.default", (ints(LOWEST), ints(-1)), "by -1"),
    ("remainder", "remainder.Tensor", (ints(LOWEST), ints(-1)), "by -1"),
    ("remainder of a number", "remainder.Scalar_Tensor", (LOWEST, ints(-1)), "by -1"),
    ("fmod", "fmod.Tensor", (ints(LOWEST), ints(-1)), "by -1"),
    ("32 bits", "fmod.Scalar", (ints(-(2**31), dtype=torch.int32), -1), "by -1"),
    ("target beyond the classes", "ctc_loss.IntList", (LOG, 9 * LABELS, [6, 6], [3, 3]), "targets has"),
    ("negative target", "ctc_loss.IntList", (LOG, -LABELS, [6, 6], [3, 3]), "targets has values"),
    ("input length", "ctc_loss.IntList", (LOG, LABELS, [6, 700], [3, 3]), "input length"),
    ("target length", "ctc_loss.IntList", (LOG, LABELS, [6, 6], [3, 99]), "do not fit the targets"),
    ("negative length", "ctc_loss.IntList", (LOG, LABELS, [6, 6], [3, -9]), "negative"),
    ("length too few", "ctc_loss.IntList", (LOG, LABELS, [6], [3, 3]), "one length for each sample"),
    ("length tensor", "ctc_loss.Tensor", (LOG, LABELS, ints(6, 7), ints(3, 3)), "input length"),
    ("blank", "ctc_loss.IntList", (LOG, LABELS, [6, 6], [3, 3], 4), "blank is not a class"),
    ("concatenated", "ctc_loss.IntList", (LOG, LABELS[0], [6, 6], [3, 3]), "do not fit the targets"),
    ("negative offset", "embedding_bag.default", bag(ints(0, 1), ints(0, -7)), "ascend from 0"),
    ("first offset", "embedding_bag.default", bag(ints(0, 1), ints(1)), "ascend from 0"),
    ("offset beyond", "embedding_bag.default", bag(ints(0, 1), ints(0, 99)), "ascend from 0"),
    ("index beyond", "embedding_bag.default", bag(ints(0, 5), ints(0)), "indices has values outside"),
    ("negative index", "embedding_bag.padding_idx", (*bag(ints(-1), ints(0)), None), "indices has"),
    ("no offsets", "embedding_bag.default", bag(ints(0, 1), ints()), "no offsets"),
    ("no last offset", "embedding_bag.default", bag(ints(0, 1), ints(0), last=True), "last offset"),
    (
        "short last offset",
        "embedding_bag.default",
        bag(ints(0, 1), ints(0, 1), last=True),
        "last offset",
    ),
    ("weight_norm", "_weight_norm.default", (torch.randn(4, 3), torch.randn(2, 1)), "shape [4, 1]"),
    (
        "weight_norm, last",
        "_weight_norm.default",
        (torch.randn(4, 3), torch.randn(1), 1),
        "shape [1, 3]",
    ),
    ("weight_norm, types", "_weight_norm.default", (torch.randn(4, 3), ints(1)), "not alike"),
    (
        "group beyond",
        "_grouped_mm.default",
        (torch.randn(4, 8), torch.randn(2, 8, 8), ints(2, 64, dtype=torch.int32)),
        "ascend from 0 to 4",
    ),
    (
        "groups descend",
        "_grouped_mm.default",
        (torch.randn(4, 8), torch.randn(2, 8, 8), ints(8, 4, dtype=torch.int32)),
        "ascend from 0 to 4",
    ),
    ("outside of a tensor", "as_strided.default", (torch.randn(9)[3:5], [3], [1]), "larger than its"),
    ("before a tensor", "as_strided.default", (torch.randn(9)[3:5], [1], [1], 0), "larger than its"),
    ("negative stride", "as_strided.default", (torch.randn(9), [2], [-1]), "negative"),
    (
        "unknown interpolation",
        "grid_sampler.default",
        (torch.randn(1, 1, 2, 2), torch.zeros(1, 2, 2, 2), 7, 0, False),
        "interpolation mode",
    ),
    (
        "scales beside sizes",
        "_upsample_bilinear2d_aa.default",
        (torch.randn(1, 3, 2, 1), [2, 33], False, 2.0, 1.0),
        "without scales",
    ),
    ("batch of hidden states", "lstm.input", lstm(input=torch.randn(2, 5, 3)), "hidden states do not"),
    ("weights of one direction", "lstm.input", lstm(params=lstm()[2][:4]), "weights do not fit"),
    ("short bias", "lstm.input", lstm(params=[*lstm()[2][:7], torch.randn(1)]), "weights do not fit"),
    ("one hidden state", "lstm.input", lstm(hx=lstm()[1][:1]), "2 hidden states"),
    (
        "packed beyond the data",
        "gru.data",
        (torch.randn(6, 3), ints(3, 2, 2), torch.zeros(1, 3, 4), [], True, 1, 0.0, False, False),
        "batch sizes do not fit",
    ),
    (
        "product larger than its tensor",
        "addbmm_.default",
        (torch.ones(4, 1), torch.ones(2, 4, 3), torch.ones(2, 3, 5)),
        "does not fit the tensor",
    ),
    ("endless power", "matrix_power.default", (torch.eye(2), LOWEST), "the exponent"),
    ("endless power, linalg", "linalg_matrix_power.default", (torch.eye(2), LOWEST), "the exponent"),
    ("pieces", "dsplit.int", (torch.zeros(5, 65, 0), 100_000), "100000 pieces are more"),
    ("pieces, rows", "vsplit.int", (torch.zeros(0, 2), 100_000), "pieces are more"),
    ("pieces, columns", "hsplit.int", (torch.zeros(2, 0), 100_000), "pieces are more"),
    ("pieces, chunks", "chunk.default", (torch.zeros(0), 100_000), "pieces are more"),
    ("pieces, sections", "tensor_split.sections", (ones(2), 2**40), "pieces are more"),
    (
        "pieces, tensor",
        "tensor_split.tensor_indices_or_sections",
        (ones(2), torch.tensor(2**40)),
        "pieces are more",
    ),
    ("pieces, length", "split.Tensor", (ones(1).expand(2**40), 1), "pieces are more"),
    ("pieces, elements", "unbind.int", (ones(1).expand(2**40), -1), "pieces are more"),
    ("stride", "conv1d.default", (ones(1, 2, 9), ones(3, 2, 2), None, [2**16]), "the stride 65536"),
    (
        "stride of a transposed convolution",
        "conv_transpose2d.input",
        (ones(1, 2, 3, 3), ones(2, 3, 2, 2), None, [1, 2**16]),
        "the stride 65536",
    ),
    (
        "steps over more than a kernel of 16 bits",
        "conv_transpose3d.input",
        (half(2, 4, 5, 6, 7), half(4, 4, 3, 1, 3), None, [1, 1, 1000]),
        "a kernel of 3 cannot have the stride 1000",
    ),
    (
        "the same by the older name, one padding for all",
        "_convolution.deprecated",
        (half(2, 2, 9, 8), half(2, 2, 2, 1), half(2), [1, 64], [0], [1, 1], True, [0, 0], 1, *FLAGS),
        "a kernel of 1 cannot have the stride 64",
    ),
    (
        "one stride for all dimensions",
        "convolution.default",
        (half(1, 2, 9, 9), half(2, 2, 2, 2), None, [48], [0], [1], False, [0], 1),
        "a kernel of 2 cannot have the stride 48",
    ),
    (
        "a dilation with a stride in 16 bits",
        "conv3d.default",
        (half(1, 2, 9, 9, 9), half(2, 2, 2, 2, 2), None, [1, 1, 2], [0] * 3, [1, 1, 5]),
        "the dilation 5",
    ),
    (
        "a transposed dilation in 16 bits",
        "conv_transpose1d.default",
        (half(1, 2, 9), half(2, 2, 2), None, [1], [0], [0], 1, [2]),
        "the dilation 2",
    ),
    (
        "too few strides",
        "conv3d.default",
        (half(1, 2, 9, 9, 9), half(2, 2, 2, 2, 2), None, [1, 1]),
        "needs 3 numbers, not 2",
    ),
    (
        "a margin that overflows",
        "replication_pad3d.default",
        (ones(2, 4, 1, 2, 2), [2**63 - 1, 2**63 - 1, 1, 1, 1, 2**31 - 1]),
        "too large for a window",
    ),
    (
        "an image that is pooled to a larger one",
        "adaptive_avg_pool3d.default",
        (ones(3, 5, 6, 14), [7, 100_000, 1]),
        "the size 100000",
    ),
    ("a place far outside", "grid_sampler.default", sampled(1e30), "far outside of the image"),
    ("a place that is none", "grid_sampler.default", sampled(math.nan), "far outside of the image"),
    (
        "dilation",
        "conv1d.padding",
        (ones(1, 2, 9), ones(3, 2, 2), None, [1], "same", [2**31]),
        "too large for a window",
    ),
    ("repetitions overflow", "repeat_interleave.Tensor", (ints(2**62, 2**62, 1),), "repeats has values"),
    ("huge repetitions", "repeat_interleave.self_Tensor", (ones(4), ints(2**62)), "repeats has values"),
    ("negative repetitions", "repeat_interleave.self_int", (ones(4), -1), "within their bounds"),
    ("repetitions too few", "repeat_interleave.self_Tensor", (ones(4), ints(1, 2)), "for each item"),
    ("endless draw", "binomial.default", (torch.tensor([math.inf]), ones(1)), "count has values"),
    ("NaN as a probability", "binomial.default", (ones(1), torch.tensor([math.nan])), "prob has values"),
    ("distances of nothing", "pdist.default", (ones(0, 3).requires_grad_(),), "no samples"),
    ("wrapped diagonal", "fill_diagonal_.default", (ones(2, 16).t(), 2.0, True), "cannot be wrapped"),
    ("wrapped column", "fill_diagonal_.default", (ones(1, 8).t(), 2.0, True), "cannot be wrapped"),
    ("system of nothing", "linalg_lstsq.default", (ones(1, 1, 1), ones(0, 1, 17)), "no elements"),
    (
        "system without a solution",
        "linalg_lstsq.default",
        (ones(1, 1, 8), torch.full((16, 1, 5), math.nan)),
        "infinite or NaN",
    ),
    ("no samples", "multi_margin_loss.default", (torch.ones(0, 4), ints()), "no samples"),
    (
        "windows that overflow",
        "im2col.default",
        (torch.ones(1, 1, 9, 8), [2, 2], [1, 2**63 - 1], [0, 0], [1, 1]),
        "too large for a window",
    ),
    ("huge power", "python::pow", (3, 2**31), "larger than 64"),
    ("tower of powers", "python::pow", (2**62, 60), "more than 64 bits"),
    ("product of 65 bits", "python::mul", (2**62, 8), "more than 64 bits"),
    ("repeated list", "python::mul", ([0], 2**40), "computes with numbers"),
    ("repeated text", "python::mul", ("x", 2**40), "computes with numbers"),
    ("formatted text", "python::mod", ("%9999999999d", 1), "computes with numbers"),
    ("joined lists", "python::add", ([0], [0]), "computes with numbers"),
    ("tensor as a number", "python::floordiv", (ints(LOWEST), ints(-1)), "computes with numbers"),
    ("tensor as a list", "python::getitem", (torch.ones(3), 5), "takes an item of a list"),
    ("slice of a list", "python::getitem", ([1, 2], slice(None)), "takes an item of a list"),
    ("rounded to nothing", "python::round", (5, -(2**62)), "at most 20 digits"),
    ("whole number of a large float", "math::ceil", (1e300,), "more than 64 bits"),
    ("sum of a text", "size::sym_sum", ("abc",), "adds a list"),
]


def _target(operator: str) -> str:
    return operator if "::" in operator else f"aten::{operator}"


@pytest.mark.parametrize(
    ("operator", "args", "says"), [a[1:] for a in ATTACKS], ids=[a[0] for a in ATTACKS]
)
def test_an_attack_is_refused(operator: str, args: tuple[Any, ...], says: str) -> None:
    kwargs = {"rounding_mode": "trunc"} if "_mode" in operator else {}
    with pytest.raises(OperandError, match=re.escape(says)) as caught:
        executable(_target(operator), "some_node")(*args, **kwargs)
    assert _target(operator) in str(caught.value)
    assert "'some_node'" in str(caught.value)


VALID: list[tuple[str, tuple[Any, ...]]] = [
    ("div.Tensor", (ints(LOWEST), ints(-1))),
    ("floor_divide.default", (torch.randn(3), ints(-1, 2, 3))),
    ("remainder.Tensor", (ints(7, 8), ints(-1, 3))),
    ("ctc_loss.IntList", (LOG, LABELS, [6, 5], [3, 2])),
    ("ctc_loss.Tensor", (LOG, LABELS[:, :1].expand(2, 3).reshape(-1), ints(6, 6), ints(3, 3))),
    ("ctc_loss.IntList", (LOG[:, 0], LABELS[0], [6], [3])),
    ("embedding_bag.padding_idx", (*bag(ints(0, 4, 2), ints(0, 1, 1)), None)),
    ("embedding_bag.default", bag(ints(0, 4, 2), ints(0, 1, 3), last=True)),
    ("_weight_norm.default", (torch.randn(4, 3, 2), torch.randn(4, 1, 1), 0)),
    ("_weight_norm.default", (torch.randn(4, 3, 2), torch.randn(1, 1, 2), 2)),
    ("_weight_norm.default", (torch.randn(4, 3, 2), torch.randn(()), -1)),
    ("as_strided.default", (torch.arange(8.0), [3, 4], [2, 1])),
    ("lstm.input", lstm()),
    ("lstm.input", lstm(batch_first=True, input=torch.randn(2, 5, 3))),
    ("repeat_interleave.Tensor", (ints(1, 0, 3),)),
    ("repeat_interleave.self_Tensor", (ones(4, 2), ints(1, 2), 1)),
    ("repeat_interleave.self_Tensor", (ones(4, 2), ints(3), -1)),
    ("repeat_interleave.self_int", (ones(4, 2), 3)),
    ("binomial.default", (ones(3), ones(3) / 2)),
    ("conv2d.default", (half(1, 2, 9, 9), half(2, 2, 1, 1), None, [2, 2])),
    ("conv2d.default", (half(1, 3, 64, 64), half(8, 3, 32, 32), None, [32, 32])),
    ("conv2d.padding", (half(1, 2, 9, 9), half(2, 2, 3, 3), None, [1, 1], "same", [4, 4])),
    ("conv_transpose2d.input", (half(1, 2, 9, 9), half(2, 2, 4, 4), None, [2, 2], [1, 1])),
    ("conv_transpose1d.default", (ones(1, 2, 9), ones(2, 2, 2), None, [48], [0], [0], 1, [3])),
    ("grid_sampler.default", sampled(-1.5)),
    ("python::pow", (2, 10)),
    ("python::pow", (2.0, 0.5)),
    ("python::round", (2.5,)),
    ("python::getitem", ((1, 2), 1)),
    ("size::sym_sum", ([1, 2],)),
]


@pytest.mark.parametrize(("operator", "args"), VALID)
def test_a_valid_call_is_made(operator: str, args: tuple[Any, ...]) -> None:
    assert executable(_target(operator), "x")(*args) is not None


def test_attention_gets_no_elements_that_share_memory() -> None:
    """The result had the strides of the query, and elements that were never written."""
    call = executable("aten::scaled_dot_product_attention.default", "x")
    values = torch.randn(2, 3, 8, 5)
    with pytest.raises(OperandError, match="share memory"):
        call(torch.randn(12).as_strided((2, 3, 5, 5), (1, 1, 1, 1)), values, values)
    for query in (torch.randn(2, 5, 3, 5).transpose(1, 2), torch.randn(1, 3, 5, 5).expand(2, 3, 5, 5)):
        assert call(query, values, values).shape == (2, 3, 5, 5)


@pytest.mark.parametrize("name", ["upsample_bicubic2d", "upsample_bilinear2d"])
def test_images_of_bytes_are_not_resized(name: str) -> None:
    """The kernel left elements of the result unwritten."""
    call = executable(f"aten::{name}.default", "x")
    with pytest.raises(OperandError, match="images of bytes"):
        call(torch.ones(1, 2, 3, 3, dtype=torch.uint8), [3, 2], False)
    assert call(torch.ones(1, 2, 3, 3), [3, 2], False) is not None


def test_random_numbers_do_not_begin_at_the_largest_one() -> None:
    """The search for the next float did not end."""
    call = executable("aten::random_.from", "x")
    with pytest.raises(OperandError, match="do not begin within"):
        call(torch.ones(3), 2**63 - 1, None)
    assert call(torch.ones(3), 0, 5) is not None


@pytest.mark.parametrize("heads", [(0, 1), (1, 0)])
def test_groups_of_heads_are_not_divided_by_none(heads: tuple[int, int]) -> None:
    """The kernel divided the heads of the query by 0, which ended the process."""
    key, value = (torch.ones(3, count, 4, 5) for count in heads)
    call = executable("aten::scaled_dot_product_attention.default", "x")
    with pytest.raises(OperandError, match="has no heads"):
        call(torch.ones(3, 1, 2, 5), key, value, enable_gqa=True)
    full = torch.ones(3, 1, 4, 5)
    assert call(torch.ones(3, 2, 4, 5), full, full, enable_gqa=True) is not None


def test_the_size_of_repetitions_is_not_believed() -> None:
    """The kernel wrote as many elements as the repetitions say into a result of the given size."""
    for operator, args in [
        ("repeat_interleave.Tensor", (ints(1, 3),)),
        ("repeat_interleave.self_Tensor", (ones(2), ints(3))),
        ("repeat_interleave.self_int", (ones(2), 3)),
    ]:
        with pytest.raises(OperandError, match="output size"):
            executable(f"aten::{operator}", "x")(*args, output_size=1)


def test_the_median_of_an_expanded_tensor_is_computed_from_its_elements() -> None:
    """The kernel ignores strides of 0 and read what follows the tensor."""
    buffer = torch.full((64,), 1e9)
    x = torch.as_strided(buffer, (1, 3, 4), (12, 4, 0))
    buffer[:9] = torch.arange(9.0)
    for operator in ("median.dim", "nanmedian.dim"):
        values, _ = executable(f"aten::{operator}", "x")(x, 2)
        assert values.tolist() == [[0.0, 4.0, 8.0]]


def test_a_program_names_the_operation_that_it_refuses() -> None:
    graph = StageGraph(
        inputs=(ValueSpec("x", torch.int64),),
        state=(),
        operations=(Operation("halved", "aten::floor_divide.default", (Ref("x"), -1)),),
        outputs=(OutputSpec("y", Ref("halved")),),
    )
    program = Program(graph, torch.device("cpu"))
    assert program([ints(4)], [])[0].tolist() == [-4]
    with pytest.raises(OperandError, match="'halved'"):
        program([ints(LOWEST)], [])


def test_every_guard_belongs_to_a_listed_operator() -> None:
    targets = {target.partition("::")[2] for target in all_targets()}
    assert not [name for name in GUARDS if name not in targets | allowed_aten()]


@pytest.mark.parametrize(
    "name", ["aten::add.t", "aten::mul.left_t", "aten::eq.enum_list", "aten::pow.int", "aten::ceil.int"]
)
def test_overloads_without_tensors_are_refused(name: str) -> None:
    """They compute with lists and texts of any length."""
    with pytest.raises(OperatorError):
        executable(name, "x")
