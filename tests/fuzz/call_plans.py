"""Random calls of operators as data: arguments that fit the operator's schema, most of them hostile.

A call is determined by a seed and a number. Tensors are described, not created, so that the same call
can be made twice with different bytes around each tensor.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from call_shapes import BOOL_NAMES, CHOICES, INDEX_NAMES, SHAPES

from ravnest.split.operator_arguments import CODES

HOSTILE_INTS = (0, -1, 1, -2, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63), 1000, 100_000)
HOSTILE_FLOATS = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e300, -1e300)
FLOATS = (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)
OTHERS = (torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
SIZES = (0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 16, 17, 33)
LARGEST = 20_000
"""Most elements of a tensor."""


@dataclass(frozen=True)
class TensorPlan:
    """A tensor: its place in memory, and how its elements are drawn."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    seed: int
    bound: int | None = None
    """Integers are drawn below this bound; None for any value."""
    hostile: bool = False
    """True if some elements are replaced by extreme ones."""
    gradient: bool = False
    values: tuple[float, ...] = ()
    """Elements of the tensor, repeated; empty if they are drawn."""

    @cached_property
    def extent(self) -> int:
        """Number of elements from the first to the last."""
        if 0 in self.sizes:
            return 0
        return 1 + sum(
            (size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)
        )


@dataclass(frozen=True)
class CallPlan:
    """A call of an operator."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool
    seed: int


@dataclass(frozen=True)
class _Parameter:
    """An argument of an operator's schema; reading a schema takes longer than planning a call."""

    name: str
    kind: str
    optional: bool
    written: bool
    by_name: bool
    has_default: bool
    default: Any


@cache
def _parameters(operator: Any) -> tuple[_Parameter, ...] | None:
    """Return the arguments of an operator; ``None`` for a function of Python."""
    schema = getattr(operator, "_schema", None)
    return None if schema is None else tuple(map(_parameter, schema.arguments))


def _parameter(argument: Any) -> _Parameter:
    kind = str(argument.real_type)
    optional = kind.startswith("Optional[")
    return _Parameter(
        argument.name,
        kind[len("Optional[") : -1] if optional else kind,
        optional,
        argument.alias_info is not None and argument.alias_info.is_write,
        argument.kwarg_only,
        argument.has_default_value(),
        argument.default_value,
    )


def plan_call(target: str, operator: Any, seed: int, number: int) -> CallPlan:
    """Return the call ``number`` of the run ``seed``."""
    draw = random.Random(f"{seed}:{number}")
    parameters = _parameters(operator)
    if parameters is None:
        args = tuple(_number(draw) for _ in range(draw.choice((1, 2, 2, 2, 3))))
        if target == "python::getitem" and draw.random() < 0.5:
            args = ([1, 2, 3], *args[1:])
        return CallPlan(target, args, {}, backward=False, seed=number)
    return _Planner(draw, target, parameters).plan(number)


def _number(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.4:
        return draw.choice(HOSTILE_INTS)
    if kind < 0.6:
        return draw.randint(-5, 70)
    if kind < 0.8:
        return draw.choice((*HOSTILE_FLOATS, draw.gauss(0, 10)))
    return draw.choice((True, False, "%999999999d", [1, 2], (3,), None, "a", [1] * 9))


class _Planner:
    def __init__(self, draw: random.Random, target: str, parameters: tuple[_Parameter, ...]) -> None:
        self._draw = draw
        self._target = target
        self._parameters = parameters
        base = target.partition("::")[2].partition(".")[0]
        self._shapes = SHAPES.get(base) or SHAPES.get(base.removesuffix("_")) or {}
        if isinstance(self._shapes, list):
            self._shapes = draw.choice(self._shapes)
        self._sizes: dict[str, int] = {}
        self._hostility = draw.choice((0.0, 0.0, 0.1, 0.3))
        self._dtype = self._base_dtype()
        self._common = tuple(draw.choice(SIZES) for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 3, 4, 5))))
        while _product(self._common) > LARGEST:
            self._common = self._common[1:]
        self._backward = draw.random() < 0.4
        self._extremes = self._dtype in SIGNED and draw.random() < 0.4
        """All elements are ends of the integers or small, so that each pair of them meets."""

    def plan(self, number: int) -> CallPlan:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self._parameters:
            if parameter.has_default and self._draw.random() < 0.35:
                if not parameter.by_name:
                    args.append(parameter.default)
                continue
            value = self._argument(parameter)
            if parameter.by_name:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return CallPlan(self._target, tuple(args), kwargs, self._backward, number)

    def _base_dtype(self) -> torch.dtype:
        kind = self._draw.random()
        if kind < 0.65:
            return self._draw.choice(FLOATS)
        return self._draw.choice(INTEGERS if kind < 0.9 else OTHERS)

    def _hostile(self) -> bool:
        return self._draw.random() < self._hostility

    def _argument(self, parameter: _Parameter) -> Any:
        kind, name = parameter.kind, parameter.name
        if parameter.optional and self._draw.random() < 0.3:
            return None
        shape = self._shapes.get(name)
        match kind:
            case "Tensor":
                return self._tensor(name, shape, written=parameter.written)
            case "List[Tensor]" | "List[Optional[Tensor]]":
                return self._tensors(name, shape, optional="Optional" in kind)
            case "int":
                return self._int(name, shape)
            case "List[int]":
                return self._ints(name, shape)
            case "float":
                return self._float()
            case "List[number]":
                return self._ints(name, shape)
            case "List[float]":
                return [self._float() for _ in range(self._draw.randint(0, 4))]
            case "bool":
                return self._draw.random() < 0.5
            case "List[bool]":
                return [self._draw.random() < 0.5 for _ in range(self._draw.randint(1, 4))]
            case "number":
                return self._draw.choice((self._int(name, shape), self._float(), True))
            case "str":
                fixed = shape is not None and not self._hostile()
                return shape.removeprefix("=") if fixed else self._draw.choice(CHOICES)
            case "ScalarType":
                return self._draw.choice((*FLOATS, *INTEGERS, *OTHERS))
            case "Layout":
                return torch.strided
            case "MemoryFormat":
                return self._draw.choice(
                    (torch.contiguous_format, torch.preserve_format, torch.channels_last)
                )
            case "Device":
                return torch.device("cpu")
            case _:
                return None

    def _float(self) -> float:
        if self._hostile():
            return self._draw.choice(HOSTILE_FLOATS)
        return self._draw.choice((0.0, 0.1, 0.5, 0.9, 1.0, 2.0, self._draw.gauss(0, 2)))

    def _int(self, name: str, shape: str | None) -> int:
        if name in CODES:  # others are refused when a stage is read
            return self._draw.choice(CODES[name])
        if self._hostile():
            return self._draw.choice(HOSTILE_INTS)
        if shape is not None:
            return self._value_of(shape.removeprefix("="))
        if "dim" in name or "axis" in name:
            return self._draw.choice((0, 0, 1, -1, -1, 2, -2, 3))
        return self._draw.choice((0, 1, 1, 2, 2, 3, 4, 5, -1))

    def _ints(self, name: str, shape: str | None) -> list[int]:
        if shape is not None:
            values = [self._value_of(part) for part in shape.removeprefix("=").split()]
        elif "dim" in name:
            values = [self._draw.randint(-3, 3) for _ in range(self._draw.randint(0, 3))]
        elif name in ("size", "sizes", "shape", "repeats") and self._draw.random() < 0.7:
            values = list(self._common) or [2]
        else:
            length = self._draw.choice((1, 1, 2, 2, 3, 4, 6))
            values = [self._draw.choice((0, 1, 1, 2, 2, 3)) for _ in range(length)]
        values = [self._draw.choice(HOSTILE_INTS) if self._hostile() else value for value in values]
        if self._hostile():
            values = values[1:] if self._draw.random() < 0.5 else [*values, *values]
        return values

    def _tensors(self, name: str, shape: str | None, *, optional: bool) -> list[TensorPlan | None]:
        if shape is not None:
            specs = [spec.strip() for spec in shape.split(",")]
            if self._hostile():
                specs = specs[1:]
        else:
            specs = [""] * self._draw.choice((0, 1, 1, 2, 2, 3))
        return [
            None
            if optional and self._draw.random() < 0.25
            else self._tensor(name, spec or None, written=False)
            for spec in specs
        ]

    def _tensor(self, name: str, shape: str | None, *, written: bool) -> TensorPlan:
        bound: int | None = None
        dtype = self._dtype
        if shape is not None and shape.startswith("i<"):
            limit, _, shape = shape[2:].partition(":")
            bound, dtype = max(self._value_of(limit), 1), torch.int64
        elif shape is not None and shape.startswith("v:"):
            return self._values(shape[2:])
        elif shape is not None and shape.startswith("u:"):
            sizes = tuple(map(self._value_of, shape[2:].split()))
            return TensorPlan(dtype, sizes, self._strides(sizes), 0, values=(0.5, 0.25))
        elif shape is not None and shape.startswith("e:"):
            size = self._value_of(shape[2:])
            return TensorPlan(dtype, (size, size), (size, 1), 0, values=(1.0, *[0.0] * size))
        elif shape is not None and shape.startswith("b:"):
            shape, dtype = shape[2:], torch.bool
        elif shape is None and name in INDEX_NAMES:
            bound, dtype = self._draw.choice((1, 2, 3, 5, 8)), torch.int64
        elif shape is None and name in BOOL_NAMES:
            dtype = torch.bool
        if dtype is torch.int64 and self._draw.random() < 0.15:
            dtype = torch.int32
        if self._hostile():
            dtype = self._draw.choice((*FLOATS, *INTEGERS, *OTHERS))
        if self._extremes and shape is None and bound is None and dtype in SIGNED:
            sizes = self._related()
            return TensorPlan(dtype, sizes, self._strides(sizes), 0, values=self._ends(dtype))
        sizes = (
            self._related() if shape is None else tuple(self._value_of(part) for part in shape.split())
        )
        if self._hostile():
            sizes = self._changed(sizes)
        while _product(sizes) > LARGEST:
            sizes = sizes[1:]
        floating = dtype.is_floating_point or dtype.is_complex
        return TensorPlan(
            dtype,
            sizes,
            self._strides(sizes),
            self._draw.getrandbits(40),
            bound,
            hostile=self._hostile(),
            gradient=self._backward and floating and not written and self._draw.random() < 0.8,
        )

    def _ends(self, dtype: torch.dtype) -> tuple[int, ...]:
        found = torch.iinfo(dtype)
        values = [found.min, found.max, found.min + 1, -1, 0, 1, 7, -2]
        return tuple(self._draw.sample(values, len(values)))

    def _values(self, text: str) -> TensorPlan:
        """Return a vector of these integers, some replaced by hostile ones."""
        values = [int(value) for value in text.split()]
        values = [self._draw.choice(HOSTILE_INTS) if self._hostile() else value for value in values]
        dtype = self._draw.choice((torch.int64, torch.int32))
        return TensorPlan(dtype, (len(values),), (1,), 0, values=tuple(values))

    def _related(self) -> tuple[int, ...]:
        """Return the common shape, or one that broadcasts to it."""
        sizes = self._common
        kind = self._draw.random()
        if kind < 0.7:
            return sizes
        if kind < 0.85:
            return tuple(1 if self._draw.random() < 0.4 else size for size in sizes)
        return sizes[self._draw.randint(0, len(sizes)) :]

    def _changed(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        kind = self._draw.random()
        if kind < 0.2 or not sizes:
            return (*sizes, self._draw.choice(SIZES))
        if kind < 0.4:
            return sizes[1:]
        at = self._draw.randrange(len(sizes))
        changed = max(self._draw.choice((0, 1, sizes[at] - 1, sizes[at] + 1, 2 * sizes[at], 65)), 0)
        return (*sizes[:at], changed, *sizes[at + 1 :])

    def _strides(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        order = list(range(len(sizes)))
        kind = self._draw.random()
        if kind < 0.25:
            self._draw.shuffle(order)
        strides = [0] * len(sizes)
        step = self._draw.choice((2, 3)) if kind > 0.9 else 1
        for position in reversed(order):
            strides[position] = step
            step *= max(sizes[position], 1)
        if 0.75 < kind <= 0.85:
            strides = [0 if self._draw.random() < 0.5 else stride for stride in strides]
        elif 0.85 < kind <= 0.9:
            strides = [1] * len(sizes)  # rows overlap
        return tuple(strides)

    def _value_of(self, expression: str) -> int:
        """Return the size that a symbol stands for; ``4h`` is four times that of ``h``."""
        expression = expression.strip()
        if expression.lstrip("-").isdigit():
            return int(expression)
        symbol = expression.lstrip("0123456789")
        factor = int(expression[: -len(symbol)] or 1)
        if symbol not in self._sizes:
            self._sizes[symbol] = self._draw.choice(
                (1, 2, 2, 3, 4, 5, 8) if self._hostility < 0.3 else SIZES
            )
        return factor * self._sizes[symbol]


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= max(size, 1)
    return result
