"""Checks of convolutions, pooling, padding and sampling: kernels trust their sizes, steps and places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ravnest.split.refused_calls import Guard, require

_LARGEST_WINDOW = 1 << 24
"""Largest size, step or margin of a window; those of models are below a thousand."""

_LARGEST_STRIDE = 1 << 12
"""Largest stride of a convolution: its gradient takes seconds at 2^14 and ends the process at 2^16."""

_FREE_HALF_STRIDE = 2
"""Largest stride of a convolution of 16-bit values that may be larger than its kernel."""

_MOST_PLACES = 1 << 30
"""Bound of places in an image, which kernels convert to integers of 32 bits."""

_LARGEST_POOLED = 1 << 14
"""Largest size to which images are pooled: kernels that repeat values need seconds for long ones."""


def _numbers(value: Any) -> list[int]:
    """Return the integers of an argument that is a list of them, or one; others have none."""
    found = value if isinstance(value, list | tuple) else (value,)
    return [each for each in found if isinstance(each, int)]


def _windows(*args: Any, **kwargs: Any) -> None:
    """Refuse sizes, steps and margins of windows with which the kernel's arithmetic overflows."""
    for value in (*args, *kwargs.values()):
        for number in _numbers(value):
            require(abs(number) <= _LARGEST_WINDOW, f"{number} is too large for a window")


def _pooled(self: Tensor, output_size: Any) -> None:
    for number in _numbers(output_size):
        require(abs(number) <= _LARGEST_POOLED, f"the size {number} is more than {_LARGEST_POOLED}")


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    *rest: Any,
    **named: Any,
) -> None:
    """Check a convolution, for whose stride the library of convolutions generates code."""
    _check_convolution(weight, stride, dilation, is_transposed=False)
    _windows(padding, *rest, **named)


def _transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> None:
    _check_convolution(weight, stride, dilation, is_transposed=True)
    _windows(padding, output_padding, groups)


def _either(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *rest: Any,
    **named: Any,
) -> None:
    _check_convolution(weight, stride, dilation, is_transposed=transposed)
    _windows(padding, *rest, **named)


def _check_convolution(weight: Tensor, stride: Any, dilation: Any, *, is_transposed: bool) -> None:
    strides, dilations = _numbers(stride), _numbers(dilation)
    _windows(dilations)
    for number in strides:
        require(abs(number) <= _LARGEST_STRIDE, f"the stride {number} is more than {_LARGEST_STRIDE}")
    if weight.element_size() == 2 and weight.dim() > 2:
        dimensions = weight.dim() - 2
        for kernel, step, spread in zip(
            weight.shape[2:], _each(strides, dimensions), _each(dilations, dimensions), strict=True
        ):
            _check_half(kernel, step, spread, is_transposed=is_transposed)


def _check_half(kernel: int, stride: int, dilation: int, *, is_transposed: bool) -> None:
    """Refuse what generated code for values of 16 bits computes wrongly: it writes outside of tensors.

    That is seen with steps over more than the kernel and with dilations, on processors with and without
    AMX. What remains ran a hundred thousand times with random sizes and a checking allocator.
    """
    words = (
        f"in 16 bits, a kernel of {kernel} cannot have the stride {stride} and the dilation {dilation}: "
        "torch computes it wrongly; train without bf16, or change the layer"
    )
    if is_transposed:
        require(stride <= kernel and dilation == 1, f"transposed and {words}")
    else:
        require(stride <= max(kernel, _FREE_HALF_STRIDE), words)
        require(dilation == 1 or stride == 1, words)


def _each(numbers: list[int], dimensions: int) -> list[int]:
    """Return a number for each dimension; one stands for all."""
    found = numbers * dimensions if len(numbers) == 1 else numbers
    require(len(found) == dimensions, f"it needs {dimensions} numbers, not {len(numbers)}")
    return found


def _grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> None:
    """Refuse places far outside of the image, and none: kernels convert them to small integers."""
    modes = (0, 1) if input.dim() == 5 else (0, 1, 2)
    require(interpolation_mode in modes, "the interpolation mode does not exist")
    require(padding_mode in (0, 1, 2), "the padding mode does not exist")
    if grid.numel():
        farthest = grid.detach().abs().amax().item() * max(input.shape[2:], default=1)
        require(farthest <= _MOST_PLACES, "the grid has places far outside of the image, or NaN")


def float_image(self: Tensor, *_: Any, **__: Any) -> None:
    """Refuse bytes: their kernel leaves some elements of the result unwritten."""
    require(self.dtype != torch.uint8, "images of bytes are not resized")


def _sizes_only(self: Tensor, output_size: Sequence[int], *options: Any, **named: Any) -> None:
    """Refuse scales beside the output size, with which the kernel computes places in its input."""
    float_image(self)
    scales = [*options, *(value for name, value in named.items() if name.startswith("scales"))]
    require(
        all(value is None or isinstance(value, bool) for value in scales),
        "stages give it an output size without scales, or scales with the overload vec",
    )


def _of(guard: Callable[..., None], *names: str) -> dict[str, Guard]:
    return dict.fromkeys(names, guard)


WINDOW_GUARDS: dict[str, Guard] = {
    **_of(_convolution, *(f"conv{n}d" for n in (1, 2, 3))),
    **_of(_transposed, *(f"conv_transpose{n}d" for n in (1, 2, 3))),
    **_of(_either, "convolution", "_convolution"),
    **_of(_windows, "conv_tbc", "im2col", "col2im", "unfold", "pad", "constant_pad_nd"),
    **_of(_windows, *(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3))),
    **_of(_windows, *(f"{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3))),
    **_of(_windows, *(f"max_pool{n}d_with_indices" for n in (1, 2, 3))),
    **_of(_windows, *(f"{name}{n}d" for name in ("max_unpool", "fractional_max_pool") for n in (2, 3))),
    **_of(_pooled, *(f"adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3))),
    **_of(
        _sizes_only,
        *(f"upsample_{kind}.default" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
        *(f"_upsample_{kind}2d_aa.default" for kind in ("bilinear", "bicubic")),
        *(
            f"{kind}{n}d.default"
            for kind in ("upsample_nearest", "_upsample_nearest_exact")
            for n in (1, 2, 3)
        ),
    ),
    **_of(float_image, "upsample_bicubic2d", "upsample_bilinear2d"),
    "grid_sampler": _grid_sampler,
}
"""Guards by the operator's name."""
