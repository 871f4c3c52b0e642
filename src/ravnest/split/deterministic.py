"""A graph with constants in the place of random numbers, for comparisons of its results.

Dropout is turned off, draws from a distribution become one value, and a random permutation reverses
the order: a permutation of samples must not look like an operation on each sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec.structs import replace

from ravnest.split.graph import Argument, Operation, Ref, StageGraph
from ravnest.split.operators import resolve

_Arguments = dict[str, Argument]
"""Arguments of an operation by the names of the operator's schema; defaults are left out."""

_SETTINGS: dict[str, tuple[str, Argument]] = {
    **dict.fromkeys(("dropout", "dropout_", "native_dropout"), ("train", False)),
    **dict.fromkeys(("feature_dropout", "feature_dropout_"), ("train", False)),
    **dict.fromkeys(("alpha_dropout", "alpha_dropout_"), ("train", False)),
    **dict.fromkeys(("feature_alpha_dropout", "feature_alpha_dropout_"), ("train", False)),
    **dict.fromkeys(("rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"), ("training", False)),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", 0.0)),
    "scaled_dot_product_attention": ("dropout_p", 0.0),
    "_scaled_dot_product_attention_math": ("dropout_p", 0.0),
}
"""Operators with a switch for their randomness: the argument and its value for none."""
_DRAWS: dict[str, float] = {
    **dict.fromkeys(("rand", "randn", "uniform", "exponential", "cauchy", "log_normal"), 0.5),
    "bernoulli": 1.0,
    "geometric": 1.0,
}
"""Distributions and the value that each draw becomes."""
_MEANS = ("poisson", "_standard_gamma", "_sample_dirichlet")
"""Distributions of a tensor of parameters, which the draw becomes."""
_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")


def without_randomness(graph: StageGraph) -> StageGraph | str:
    """Return the graph without random numbers, or the name of the operator that prevents it."""
    operations: list[Operation] = []
    for operation in graph.operations:
        if not draws_random_numbers(operation.target):
            operations.append(operation)
            continue
        replaced = _replace(operation)
        if replaced is None:
            return operation.target.partition("::")[2].partition(".")[0]
        operations += replaced
    return replace(graph, operations=tuple(operations))


def draws_random_numbers(target: str) -> bool:
    """Return True for an operator that may use a random number generator."""
    operator = resolve(target)
    return (
        isinstance(operator, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in operator.tags
    )


def _replace(operation: Operation) -> list[Operation] | None:
    """Return the operations that take the place of a random one; None if it is not known."""
    base, _, overload = operation.target.partition("::")[2].partition(".")
    arguments = _named_arguments(operation)
    if base in _SETTINGS:
        name, value = _SETTINGS[base]
        return [_call(operation, operation.target, {**arguments, name: value})]
    if base.endswith("_"):
        return _fill(operation, base[:-1], arguments)
    make = _FUNCTIONS.get(base)
    if make is not None:
        return make(operation, arguments)
    if base in _MEANS:
        return [_call(operation, "aten::clone.default", {"self": arguments["self"]})]
    if base == "normal" and "Tensor" in overload:
        return [_normal(operation, overload, arguments)]
    if base.removesuffix("_like") in (*_DRAWS, "randint", "normal"):
        return [_full(operation, base.removesuffix("_like"), arguments)]
    return None


def _named_arguments(operation: Operation) -> _Arguments:
    operator = resolve(operation.target)
    assert isinstance(operator, torch._ops.OpOverload)
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, operation.args, strict=False))
    return given | dict(operation.kwargs)


def _call(
    operation: Operation, target: str, arguments: _Arguments, name: str | None = None
) -> Operation:
    """Return a call of ``target`` in the place of an operation, all arguments by name."""
    return replace(
        operation,
        name=name or operation.name,
        target=target,
        args=(),
        kwargs=tuple((key, value) for key, value in arguments.items() if key != "generator"),
    )


def _value(distribution: str, arguments: _Arguments) -> Argument:
    if distribution in ("randint", "random"):
        return arguments.get("low", arguments.get("from")) or 0
    return _DRAWS.get(distribution, 0.5)


def _fill(operation: Operation, distribution: str, arguments: _Arguments) -> list[Operation] | None:
    if distribution not in (*_DRAWS, "normal", "random"):
        return None
    value = _value(distribution, arguments)
    return [
        _call(operation, "aten::fill_.Scalar", {"self": arguments["self"], "value": value}),
    ]


def _full(operation: Operation, distribution: str, arguments: _Arguments) -> Operation:
    """Return a constant tensor of the size, or of the shape of the tensor, that a draw has."""
    options = {name: arguments[name] for name in _OPTIONS if name in arguments}
    value = _value(distribution, arguments)
    if "self" in arguments:
        given: _Arguments = {"self": arguments["self"], "fill_value": value, **options}
        return _call(operation, "aten::full_like.default", given)
    given = {"size": arguments["size"], "fill_value": value, **options}
    return _call(operation, "aten::full.default", given)


def _normal(operation: Operation, overload: str, arguments: _Arguments) -> Operation:
    if overload == "Tensor_Tensor":
        given = {"self": arguments["mean"], "other": arguments["std"]}
        return _call(operation, "aten::add.Tensor", given)
    tensor = arguments["mean"] if overload == "Tensor_float" else arguments["std"]
    return _call(operation, "aten::clone.default", {"self": tensor})


def _reverse(operation: Operation, arguments: _Arguments) -> list[Operation]:
    options = {name: arguments[name] for name in _OPTIONS if name in arguments}
    ascending = f"{operation.name}_ascending"
    return [
        _call(operation, "aten::arange.default", {"end": arguments["n"], **options}, ascending),
        _call(operation, "aten::flip.default", {"self": Ref(ascending), "dims": (0,)}),
    ]


def _most_likely(operation: Operation, arguments: _Arguments) -> list[Operation]:
    best = f"{operation.name}_best"
    count = arguments["num_samples"]
    return [
        _call(
            operation,
            "aten::argmax.default",
            {"self": arguments["self"], "dim": -1, "keepdim": True},
            best,
        ),
        _call(
            operation,
            "aten::repeat_interleave.self_int",
            {"self": Ref(best), "repeats": count, "dim": -1},
        ),
    ]


def _expected(operation: Operation, arguments: _Arguments) -> list[Operation]:
    given = {"self": arguments["count"], "other": arguments["prob"]}
    return [_call(operation, "aten::mul.Tensor", given)]


_FUNCTIONS: dict[str, Callable[[Operation, _Arguments], list[Operation]]] = {
    "randperm": _reverse,
    "multinomial": _most_likely,
    "binomial": _expected,
}
