"""Shapes of valid calls, by operator and argument, from which hostile calls are made.

A shape lists sizes, each a number or a symbol with one value per call (``4h``: four times ``h``).
``i<v: n`` is a tensor of indices below ``v`` with shape ``n``; ``b: n`` is a mask; ``u: n`` has values
between 0 and 1; ``v: 3 2`` is the vector with these integers; ``e: n`` is the identity of n rows; ``=c``
gives the integers of a list, a number or a text. Commas separate the tensors of a list. Operators
without an entry get tensors whose shapes broadcast. A list has alternatives.
"""

from __future__ import annotations

from typing import Any

Shapes = dict[str, str]

INDEX_NAMES = frozenset(
    [
        "index",
        "indices",
        "target",
        "targets",
        "offsets",
        "lengths",
        "batch_sizes",
        "boundaries",
        "test_elements",
    ]
)
BOOL_NAMES = frozenset({"mask", "condition"})
CHOICES = (
    "none", "mean", "sum", "floor", "trunc", "constant", "reflect", "replicate", "circular",
    "ij", "xy", "valid", "same", "left", "right", "ortho", "forward", "backward", "linear",
    "lower", "nearest", "prod", "amax", "amin", "L", "U", "fro", "nuc", "tanh", "ab,bc->ac", "", "x",
)  # fmt: skip

_NORM = {
    "input": "n c l",
    "weight": "c",
    "bias": "c",
    "running_mean": "c",
    "running_var": "c",
    "normalized_shape": "=l",
}
_LAYER = {"input": "n l c", "weight": "c", "bias": "c", "normalized_shape": "=c"}
_POOL1 = {"self": "n c 9", "input": "n c 9", "kernel_size": "=k", "output_size": "=o"}
_POOL2 = {"self": "n c 9 8", "input": "n c 9 8", "kernel_size": "=k j", "output_size": "=o p"}
_POOL3 = {"self": "n c 5 6 7", "input": "n c 5 6 7", "kernel_size": "=k j i", "output_size": "=o p q"}
_ROWS = {"self": "a b", "dim": "=0", "index": "i<a: k", "source": "k b", "tensor": "k b", "src": "k b"}
_PLACES = {"self": "a b", "dim": "=0", "index": "i<a: k b", "src": "k b", "indices": "i<a: k b"}
_NLL = {"self": "n c", "target": "i<c: n", "weight": "c", "ignore_index": "=-100"}
_NLL2 = {"self": "n c h w", "target": "i<c: n h w", "weight": "c", "ignore_index": "=-100"}
_SQUARE = dict.fromkeys(("self", "A", "input", "LU", "L"), "n a a") | {
    "B": "n a k",
    "other": "n a k",
}
_IDENTITY = {"self": "e: a", "A": "e: a"}
_LSTM = {"input": "t n i", "num_layers": "=1"}
_PACKED = {"data": "6 i", "batch_sizes": "v: 3 2 1", "num_layers": "=1"}


def _recurrent(gates: int, states: int) -> list[Shapes]:
    weights = f"{gates}h i, {gates}h h, {gates}h, {gates}h"
    hidden = ", ".join(["1 n h"] * states)
    both = ", ".join([weights, weights])
    return [
        {**_LSTM, **_PACKED, "params": weights, "hx": hidden},
        {**_LSTM, **_PACKED, "params": weights, "hx": hidden.replace("n", "3")},
        {**_LSTM, **_PACKED, "params": both, "hx": ", ".join(["2 n h"] * states)},
        {**_LSTM, **_PACKED, "params": both, "hx": ", ".join(["2 3 h"] * states)},
    ]


def _cell(gates: int, states: int) -> Shapes:
    return {
        "input": "n i",
        "hx": ", ".join(["n h"] * states),
        "w_ih": f"{gates}h i",
        "w_hh": f"{gates}h h",
        "b_ih": f"{gates}h",
        "b_hh": f"{gates}h",
    }


def _convolution(place: str, taps: str, *, transposed: bool = False) -> Shapes:
    count = len(taps.split())
    channels = "c d" if transposed else "d c"
    return {
        "input": f"n c {place}",
        "self": f"n c {place}",
        "weight": f"{channels} {taps}",
        "bias": "d",
        "groups": "=1",
        "stride": "=" + " 1" * count,
        "padding": "=" + " 0" * count,
        "dilation": "=" + " 1" * count,
        "output_padding": "=" + " 0" * count,
        "output_mask": "",
    }


SHAPES: dict[str, Any] = {
    "fill": {"self": "a b", "value": ""},
    "linspace": {"start": "", "end": "", "steps": "=k"},
    "logspace": {"start": "", "end": "", "steps": "=k"},
    "randint_like": {"self": "a b", "high": ""},
    "select_scatter": {"self": "a b", "src": "b", "dim": "=0", "index": "=0"},
    "slice_scatter": {"self": "a b", "src": "a b", "dim": "=0", "start": "=0", "step": "=1"},
    "diagonal_scatter": {"self": "a a", "src": "a", "offset": "=0", "dim1": "=0", "dim2": "=1"},
    "permute": {"self": "a b c", "dims": "=2 0 1"},
    "narrow": {"self": "a b", "dim": "=0", "start": "i<1: ", "length": "=1"},
    "split": {"self": "5 b", "split_size": "=2 3", "dim": "=0"},
    "tensor_split": {
        "self": "6 b",
        "tensor_indices_or_sections": "v: 2 4",
        "indices": "=2 4",
        "sections": "=2",
        "dim": "=0",
    },
    "linalg_norm": {"self": "a b", "ord": "=fro", "dim": "=0 1"},
    "meshgrid": {"tensors": "a, b", "indexing": "=ij"},
    "kl_div": {"self": "n c", "target": "u: n c"},
    "binary_cross_entropy_with_logits": {
        "self": "n c",
        "target": "u: n c",
        "weight": "c",
        "pos_weight": "c",
    },
    "gradient": {"self": "4 5", "spacing": "=1 1", "dim": "=0 1", "edge_order": "=1"},
    "binomial": {"count": "u: n", "prob": "u: n"},
    "batch_norm": _NORM,
    "instance_norm": _NORM,
    "native_batch_norm": _NORM,
    "_native_batch_norm_legit": _NORM,
    "_native_batch_norm_legit_no_training": _NORM,
    "_batch_norm_with_update": _NORM,
    "layer_norm": _LAYER,
    "native_layer_norm": _LAYER,
    "rms_norm": _LAYER,
    "_fused_rms_norm": _LAYER,
    "group_norm": {"input": "n c l", "num_groups": "=1", "weight": "c", "bias": "c"},
    "native_group_norm": {
        "input": "n c l",
        "weight": "c",
        "bias": "c",
        "N": "=n",
        "C": "=c",
        "HxW": "=l",
        "group": "=1",
    },
    "conv1d": _convolution("9", "k"),
    "conv2d": _convolution("9 8", "k j"),
    "conv3d": _convolution("5 6 7", "k j i"),
    "convolution": [
        _convolution("9 8", "k j"),
        _convolution("9", "k"),
        _convolution("9 8", "k j", transposed=True),
    ],
    "_convolution": [
        _convolution("9 8", "k j"),
        _convolution("9", "k"),
        _convolution("9 8", "k j", transposed=True),
    ],
    "_convolution_mode": _convolution("9 8", "k j"),
    "conv_transpose1d": _convolution("9", "k", transposed=True),
    "conv_transpose2d": _convolution("9 8", "k j", transposed=True),
    "conv_transpose3d": _convolution("5 6 7", "k j i", transposed=True),
    "conv_tbc": {"self": "t b c", "weight": "k c d", "bias": "d", "pad": "=0"},
    "linear": {"input": "n i", "weight": "o i", "bias": "o"},
    "bilinear": {"input1": "n i", "input2": "n j", "weight": "o i j", "bias": "o"},
    "embedding": {"weight": "v d", "indices": "i<v: n l", "padding_idx": "=-1"},
    "embedding_renorm_": {"self": "v d", "indices": "i<v: n"},
    "embedding_bag": [
        {
            "weight": "v d",
            "indices": "i<v: m",
            "offsets": "i<m: b",
            "per_sample_weights": "m",
            "mode": "=0",
        },
        {"weight": "v d", "indices": "i<v: m", "offsets": "i<m: b", "per_sample_weights": "m"},
        {
            "weight": "v d",
            "indices": "i<v: 6",
            "offsets": "v: 0 2 4",
            "per_sample_weights": "6",
            "mode": "=0",
            "padding_idx": "=0",
        },
        {
            "weight": "v d",
            "indices": "i<v: 6",
            "offsets": "v: 0 2 6",
            "mode": "=1",
            "padding_idx": "=0",
        },
    ],
    "_embedding_bag": {
        "weight": "v d",
        "indices": "i<v: m",
        "offsets": "i<m: b",
        "per_sample_weights": "m",
    },
    "nll_loss": _NLL,
    "nll_loss_nd": _NLL,
    "nll_loss_forward": _NLL,
    "nll_loss2d": _NLL2,
    "nll_loss2d_forward": _NLL2,
    "cross_entropy_loss": [_NLL, _NLL2],
    "multi_margin_loss": {"self": "n c", "target": "i<c: n", "weight": "c", "p": "=1"},
    "multilabel_margin_loss": {"self": "n c", "target": "i<c: n c"},
    "multilabel_margin_loss_forward": {"self": "n c", "target": "i<c: n c"},
    "ctc_loss": [
        {
            "log_probs": "t n c",
            "targets": "i<c: n s",
            "input_lengths": "i<t: n",
            "target_lengths": "i<s: n",
        },
        {"log_probs": "8 2 c", "targets": "i<c: 2 3", "input_lengths": "=8 8", "target_lengths": "=3 2"},
        {"log_probs": "8 2 c", "targets": "i<c: 5", "input_lengths": "=8 8", "target_lengths": "=3 2"},
    ],
    "gather": _PLACES,
    "scatter": _PLACES | {"reduce": "=add"},
    "scatter_add": _PLACES,
    "scatter_reduce": _PLACES | {"reduce": "=sum"},
    "take_along_dim": _PLACES,
    "index_select": _ROWS,
    "index_add": _ROWS,
    "index_copy": _ROWS,
    "index_fill": _ROWS | {"value": ""},
    "index_reduce": _ROWS | {"reduce": "=prod"},
    "index": {"self": "a b c", "indices": "i<a: k, i<b: k"},
    "index_put": {"self": "a b c", "indices": "i<a: k, i<b: k", "values": "k c"},
    "take": {"self": "a", "index": "i<a: k"},
    "put": {"self": "a", "index": "i<a: k", "source": "k"},
    "mm": {"self": "a b", "mat2": "b c"},
    "bmm": {"self": "n a b", "mat2": "n b c"},
    "addmm": {"self": "a c", "mat1": "a b", "mat2": "b c"},
    "baddbmm": {"self": "n a c", "batch1": "n a b", "batch2": "n b c"},
    "addbmm": {"self": "a c", "batch1": "n a b", "batch2": "n b c"},
    "mv": {"self": "a b", "vec": "b"},
    "addmv": {"self": "a", "mat": "a b", "vec": "b"},
    "addr": {"self": "a b", "vec1": "a", "vec2": "b"},
    "dot": {"self": "a", "tensor": "a"},
    "vdot": {"self": "a", "other": "a"},
    "ger": {"self": "a", "vec2": "b"},
    "outer": {"self": "a", "vec2": "b"},
    "matmul": [{"self": "n a b", "other": "b c"}, {"self": "a b", "other": "b"}],
    "linalg_matmul": {"self": "n a b", "other": "b c"},
    "chain_matmul": {"matrices": "a b, b c, c d"},
    "linalg_multi_dot": {"tensors": "a b, b c, c d"},
    "einsum": {"tensors": "a b, b c", "equation": "=ab,bc->ac"},
    "binary_cross_entropy": {"self": "u: n c", "target": "u: n c", "weight": "n c"},
    "quantile": {"self": "n c", "q": "u: k"},
    "nanquantile": {"self": "n c", "q": "u: k"},
    "movedim": {"self": "a b c", "source": "=0 1", "destination": "=1 0"},
    "tensordot": {"self": "a b", "other": "b c", "dims_self": "=1", "dims_other": "=0"},
    "scaled_dot_product_attention": {
        "query": "n g l d",
        "key": "n g s d",
        "value": "n g s e",
        "attn_mask": "l s",
    },
    "_scaled_dot_product_attention_math": {
        "query": "n g l d",
        "key": "n g s d",
        "value": "n g s e",
        "attn_mask": "l s",
        "dropout_mask": "n g l s",
    },
    "lstm": _recurrent(4, 2),
    "gru": _recurrent(3, 1),
    "rnn_tanh": _recurrent(1, 1),
    "rnn_relu": _recurrent(1, 1),
    "lstm_cell": _cell(4, 2),
    "gru_cell": _cell(3, 1),
    "rnn_tanh_cell": _cell(1, 1),
    "rnn_relu_cell": _cell(1, 1),
    "_thnn_fused_lstm_cell": {
        "input_gates": "n 4h",
        "hidden_gates": "n 4h",
        "cx": "n h",
        "input_bias": "4h",
        "hidden_bias": "4h",
    },
    "_thnn_fused_gru_cell": {
        "input_gates": "n 3h",
        "hidden_gates": "n 3h",
        "hx": "n h",
        "input_bias": "3h",
        "hidden_bias": "3h",
    },
    "max_unpool2d": {"self": "n c 2 2", "indices": "i<16: n c 2 2", "output_size": "=4 4"},
    "max_unpool3d": {
        "self": "n c 2 2 2",
        "indices": "i<64: n c 2 2 2",
        "output_size": "=4 4 4",
        "stride": "=2 2 2",
        "padding": "=0 0 0",
    },
    "grid_sampler": [
        {"input": "n c h w", "grid": "n k j 2"},
        {"input": "n c d h w", "grid": "n k j i 3"},
    ],
    "grid_sampler_2d": {"input": "n c h w", "grid": "n k j 2"},
    "grid_sampler_3d": {"input": "n c d h w", "grid": "n k j i 3"},
    "affine_grid_generator": {"theta": "n 2 3", "size": "=n 3 h w"},
    "im2col": {
        "self": "n c 9 8",
        "kernel_size": "=2 2",
        "dilation": "=1 1",
        "padding": "=0 0",
        "stride": "=1 1",
    },
    "col2im": {
        "self": "n 4c 9",
        "output_size": "=4 4",
        "kernel_size": "=2 2",
        "dilation": "=1 1",
        "padding": "=0 0",
        "stride": "=1 1",
    },
    "bincount": {"self": "i<8: n", "weights": "n", "minlength": "=m"},
    "one_hot": {"self": "i<c: n", "num_classes": "=c"},
    "repeat_interleave": [{"self": "a b", "repeats": "i<4: a", "dim": "=0"}, {"repeats": "i<4: a"}],
    "searchsorted": [
        {"sorted_sequence": "n k", "self": "n l", "sorter": "i<k: n k"},
        {"sorted_sequence": "k", "self": "l", "sorter": "i<k: k"},
    ],
    "bucketize": {"self": "n", "boundaries": "k"},
    "prelu": {"self": "n c l", "weight": "c"},
    "_prelu_kernel": {"self": "n c l", "weight": "c"},
    "_weight_norm": {"v": "a b", "g": "a 1", "dim": "=0"},
    "_weight_norm_interface": {"v": "a b", "g": "a 1", "dim": "=0"},
    "norm_except_dim": {"v": "a b", "dim": "=0"},
    "masked_fill": {"self": "a b", "mask": "b: a b", "value": ""},
    "masked_scatter": {"self": "a b", "mask": "b: a b", "source": "a b"},
    "masked_select": {"self": "a b", "mask": "b: a b"},
    "pixel_shuffle": {"self": "n 4c h w", "upscale_factor": "=2"},
    "pixel_unshuffle": {"self": "n c 4 6", "downscale_factor": "=2"},
    "channel_shuffle": {"self": "n 4c h w", "groups": "=2"},
    "native_channel_shuffle": {"self": "n 4c h w", "groups": "=2"},
    "cdist": {"x1": "n a d", "x2": "n b d"},
    "_cdist_forward": {"x1": "n a d", "x2": "n b d"},
    "_euclidean_dist": {"x1": "a d", "x2": "b d"},
    "stft": {"self": "n 33", "n_fft": "=8", "hop_length": "=2", "win_length": "=8", "window": "8"},
    "istft": {"self": "n 5 9", "n_fft": "=8", "hop_length": "=2", "win_length": "=8", "window": "8"},
    "segment_reduce": {"data": "a b", "lengths": "i<3: k", "indices": "i<a: k", "offsets": "i<a: k"},
    "_grouped_mm": [
        {"self": "m a", "mat2": "g a b", "offs": "i<m: g"},
        {"self": "8 a", "mat2": "3 a b", "offs": "v: 2 5 8"},
        {"self": "g a b", "mat2": "g b c"},
        {"self": "a 8", "mat2": "8 b", "offs": "v: 2 5 8"},
        {"self": "3 a b", "mat2": "b 8", "offs": "v: 2 5 8"},
    ],
    "cross": {"self": "n 3", "other": "n 3", "dim": "=1"},
    "linalg_cross": {"self": "n 3", "other": "n 3", "dim": "=1"},
    "fractional_max_pool2d": {
        "self": "n c 9 8",
        "kernel_size": "=2 2",
        "output_size": "=o p",
        "random_samples": "n c 2",
    },
    "fractional_max_pool3d": {
        "self": "n c 5 6 7",
        "kernel_size": "=2 2 2",
        "output_size": "=o p q",
        "random_samples": "n c 3",
    },
    "multinomial": {"self": "n c", "num_samples": "=c"},
    "lu_solve": {"self": "a k", "LU_data": "a a", "LU_pivots": "i<a: a"},
    "linalg_lu_solve": {"LU": "a a", "pivots": "i<a: a", "B": "a k"},
    "lu_unpack": {"LU_data": "a a", "LU_pivots": "i<a: a"},
    "linalg_ldl_solve": {"LD": "a a", "pivots": "i<a: a", "B": "a k"},
    "ormqr": {"self": "a b", "input2": "b", "input3": "a c"},
    "orgqr": {"self": "a b", "input2": "b"},
    "linalg_householder_product": {"input": "a b", "tau": "b"},
    "triangular_solve": {"self": "a k", "A": "a a"},
    "cholesky_solve": {"self": "a k", "input2": "a a"},
    "linalg_lstsq": {"self": "n a b", "b": "n a k"},
    "triplet_margin_loss": {"anchor": "n d", "positive": "n d", "negative": "n d"},
    "cosine_embedding_loss": {"input1": "n d", "input2": "n d", "target": "n"},
    "kthvalue": {"self": "a b", "k": "=1", "dim": "=0"},
    "unfold": {"self": "a b", "dimension": "=0", "size": "=1", "step": "=1"},
    "as_strided": {"self": "a b", "size": "=a b", "stride": "=1 1"},
    "_reshape_alias": {"self": "a b", "size": "=a b", "stride": "=1 1"},
    "view": {"self": "a b", "size": "=b a"},
    "reshape": {"self": "a b", "size": "=b a"},
    "split_with_sizes": {"self": "5 b", "split_sizes": "=2 3", "dim": "=0"},
    "view_as_complex": {"self": "n 2"},
    **dict.fromkeys(
        (
            "adaptive_avg_pool1d",
            "adaptive_max_pool1d",
            "avg_pool1d",
            "max_pool1d",
            "max_pool1d_with_indices",
        ),
        _POOL1,
    ),
    **dict.fromkeys(
        (
            "adaptive_avg_pool2d",
            "_adaptive_avg_pool2d",
            "adaptive_max_pool2d",
            "avg_pool2d",
            "max_pool2d",
            "max_pool2d_with_indices",
        ),
        _POOL2,
    ),
    **dict.fromkeys(
        (
            "adaptive_avg_pool3d",
            "_adaptive_avg_pool3d",
            "adaptive_max_pool3d",
            "avg_pool3d",
            "max_pool3d",
            "max_pool3d_with_indices",
        ),
        _POOL3,
    ),
    **dict.fromkeys(("reflection_pad1d", "replication_pad1d"), {"self": "n c l", "padding": "=1 1"}),
    **dict.fromkeys(
        ("reflection_pad2d", "replication_pad2d"), {"self": "n c h w", "padding": "=1 1 1 1"}
    ),
    **dict.fromkeys(
        ("reflection_pad3d", "replication_pad3d"), {"self": "n c d h w", "padding": "=1 1 1 1 1 1"}
    ),
    **dict.fromkeys(
        ("upsample_linear1d", "upsample_nearest1d", "_upsample_nearest_exact1d"),
        {"self": "n c l", "input": "n c l", "output_size": "=k"},
    ),
    **dict.fromkeys(
        (
            "upsample_bicubic2d",
            "_upsample_bicubic2d_aa",
            "upsample_bilinear2d",
            "_upsample_bilinear2d_aa",
            "upsample_nearest2d",
            "_upsample_nearest_exact2d",
        ),
        {"self": "n c h w", "input": "n c h w", "output_size": "=k j"},
    ),
    **dict.fromkeys(
        ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
        {"self": "n c d h w", "input": "n c d h w", "output_size": "=k j i"},
    ),
    **dict.fromkeys(
        [
            "cholesky_inverse",
            "inverse",
            "det",
            "logdet",
            "slogdet",
            "matrix_exp",
            "matrix_power",
            "_linalg_det",
            "linalg_det",
            "_linalg_eigh",
            "linalg_eigh",
            "linalg_eigvalsh",
            "linalg_inv",
            "linalg_inv_ex",
            "linalg_ldl_factor",
            "linalg_ldl_factor_ex",
            "linalg_lu_factor",
            "linalg_lu_factor_ex",
            "linalg_matrix_exp",
            "linalg_matrix_norm",
            "linalg_qr",
            "linalg_matrix_power",
            "linalg_pinv",
            "_linalg_slogdet",
            "linalg_slogdet",
            "linalg_solve",
            "_linalg_solve_ex",
            "linalg_solve_ex",
            "linalg_solve_triangular",
            "_linalg_svd",
            "linalg_svd",
            "linalg_svdvals",
            "svd",
            "qr",
            "pinverse",
            "geqrf",
        ],
        _SQUARE,
    ),
    **dict.fromkeys(("cholesky", "linalg_cholesky", "linalg_cholesky_ex"), [_SQUARE, _IDENTITY]),
    "trace": {"self": "a b"},
}
