"""Run the stages of a model one after the other in one process, connected as over a network.

Tests compare distributed training with it, the splitter checks itself with it, and users can run a
split model without providers.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from ravnest.errors import FusionError, StageInputError
from ravnest.split.deferred import DeferredGradients
from ravnest.split.gradients import add_gradient, memory_of, own_gradient, sum_gradients
from ravnest.split.graph import InputEntry, StageSpec, StateSpec
from ravnest.split.module import StageModule

if TYPE_CHECKING:
    from ravnest.split.splitter import Split

try:  # not part of torch's public interface: other versions may not have it
    from torch.autograd.graph import _engine_run_backward
except ImportError:
    _engine_run_backward = None  # type: ignore[assignment]

Leaf = torch.Tensor | GradientEdge
"""End of a backward pass."""
Receive = Callable[[str, torch.Tensor], None]
"""Function that takes the key of a parameter and its gradient."""


@dataclass
class StagePass:
    """Forward pass of one micro-batch through one stage, kept for its backward pass."""

    module: StageModule
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    parameters: Mapping[str, torch.Tensor]
    """Version of the weights that the pass used, by key."""

    def backward(
        self,
        outputs: Sequence[tuple[Any, torch.Tensor | None]],
        seeds: Mapping[str, torch.Tensor],
        receive: Receive,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs, and pass those of the trainable parameters to ``receive``.

        ``receive`` is called with the key and the gradient as soon as autograd has it, so that gradients
        that are not kept never exist at the same time. ``outputs`` pairs tensors with their gradients.
        ``seeds`` are gradients of later stages for parameters that this stage holds too; starting from
        them keeps autograd's order of summation.
        """
        parameters = {k: p for k, p in self.parameters.items() if p.requires_grad}
        inputs = [value if _needs_gradient(value) else None for value in self.inputs]
        leaves = [value for value in inputs if value is not None]
        ends = [end for end in outputs if _needs_gradient(end[0])]
        if seeds:
            ends += [(p, seeds[key]) for key, p in parameters.items() if key in seeds]
        if not ends or not (leaves or parameters):
            return [None] * len(inputs)
        with gradients_received(parameters, receive):
            _accumulate(ends, [*leaves, *parameters.values()])
        return [None if value is None else value.grad for value in inputs]

    def accumulate(
        self,
        outputs: Sequence[tuple[Any, torch.Tensor | None]],
        gradients: dict[str, torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs, and add those of the parameters to ``gradients``.

        Autograd adds each as soon as it exists, so that there is never a second set of gradients. If
        ``deferred`` captures, the few that are not deferred exist twice for a moment.
        """
        if deferred is not None and deferred.captures:

            def take(key: str, gradient: torch.Tensor, taken: set[int]) -> None:
                gradients[key] = sum_gradients(gradients.get(key), gradient, self.parameters[key], taken)

            return self.capture(outputs, deferred, take)
        parameters = {k: p for k, p in self.parameters.items() if p.requires_grad}
        inputs = [value if _needs_gradient(value) else None for value in self.inputs]
        leaves = [value for value in inputs if value is not None]
        ends = [end for end in outputs if _needs_gradient(end[0])]
        if not ends or not (leaves or parameters):
            return [None] * len(inputs)
        for key, parameter in parameters.items():
            parameter.grad = gradients.get(key)
        _accumulate(ends, [*leaves, *parameters.values()])
        found = [None if value is None else value.grad for value in inputs]
        taken = {memory_of(gradient) for gradient in found if gradient is not None}
        for key, parameter in parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                new = key not in gradients
                gradients[key] = own_gradient(gradient, parameter, taken) if new else gradient
        return found

    def capture(
        self,
        outputs: Sequence[tuple[Any, torch.Tensor | None]],
        deferred: DeferredGradients,
        take: Callable[[str, torch.Tensor, set[int]], None],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs; give ``deferred`` the gradients that it needs.

        ``take`` gets the gradients of the other parameters, each with its key and with the memory that
        gradients use (``add_gradient``).
        """
        captured = deferred.captured
        parameters = {k: p for k, p in self.parameters.items() if k not in captured and p.requires_grad}
        needs = [_needs_gradient(value) for value in self.inputs]
        leaves = [value for value, need in zip(self.inputs, needs, strict=True) if need]
        ends = [end for end in outputs if _needs_gradient(end[0])]
        if not ends:
            return [None] * len(needs)
        edges = deferred.edges
        found = _differentiate(ends, [*leaves, *parameters.values(), *edges])
        deferred.take(found[len(found) - len(edges) :])
        rest = iter(found)
        of_inputs = [next(rest) if need else None for need in needs]
        taken = {memory_of(gradient) for gradient in of_inputs if gradient is not None}
        for key, gradient in zip(parameters, rest, strict=False):
            if gradient is not None:
                take(key, gradient, taken)
        return of_inputs


class Chain:
    """Stages chained in one process; no autograd graph crosses a stage boundary."""

    def __init__(self, modules: Iterable[StageModule]) -> None:
        self.modules = tuple(modules)
        if [m.spec.index for m in self.modules] != list(range(self.modules[0].spec.count)):
            raise StageInputError("a chain needs all the stages of one model, in order")
        self._passes: list[StagePass] = []

    @classmethod
    def of(cls, split: Split) -> Chain:
        """Return a chain with its own copy of the weights."""
        copies = (
            StageModule(stage.spec, {key: t.clone() for key, t in stage.tensors.items()})
            for stage in split.stages
        )
        return cls(copies)

    def train(self, mode: bool = True) -> Chain:
        """Switch all stages to training mode."""
        for module in self.modules:
            module.train(mode)
        return self

    def eval(self) -> Chain:
        """Switch all stages to evaluation mode."""
        return self.train(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for inputs given by position or by name."""
        values = bind_inputs(self.modules[0].spec.signature, args, kwargs)
        self._passes = []
        record = torch.is_grad_enabled()
        for module in self.modules:
            graph = module.graph
            inputs = [self._receive(values[s.name], s.gradient and record) for s in graph.inputs]
            outputs = module(*inputs)
            if record:
                received = () if module is self.modules[-1] else outputs  # the caller has the last ones
                self._passes.append(
                    StagePass(module, tuple(inputs), received, module.parameters_by_key())
                )
            values = {spec.name: value for spec, value in zip(graph.outputs, outputs, strict=True)}
        assert graph.structure is not None
        return graph.structure.build(iter(outputs))

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Compute ``.grad`` of every trainable parameter from a loss of the last output."""
        kept = () if gradient is None else (gradient,)
        if gradient is None and loss.dim() == 0 and loss.is_floating_point():
            gradient = torch.ones_like(loss)
        self.set_gradients(self.gradients([(loss, gradient)]), kept)

    def gradients(
        self, ends: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of all trainable parameters by key; free the chain's last forward."""
        found: dict[str, torch.Tensor] = {}
        self.pass_gradients(ends, found.__setitem__)
        return found

    def pass_gradients(
        self,
        ends: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        receive: Receive,
    ) -> None:
        """Pass the gradient of each trainable parameter to ``receive``, once it is complete.

        A gradient that ``receive`` does not keep is freed at once; that of a parameter in several stages
        is kept until the first of them. Frees the chain's last forward.
        """
        outputs: Sequence[tuple[Any, torch.Tensor | None]] = ends
        shared: dict[str, torch.Tensor] = {}
        while self._passes:
            step = self._passes.pop()
            earlier = {key for each in self._passes for key in each.parameters}
            seeds, shared = shared, {key: g for key, g in shared.items() if key not in step.parameters}

            def complete(
                key: str,
                gradient: torch.Tensor,
                earlier: set[str] = earlier,
                shared: dict[str, torch.Tensor] = shared,
            ) -> None:
                (shared.__setitem__ if key in earlier else receive)(key, gradient)

            of_inputs = step.backward(outputs, seeds, complete)
            arrived = {
                spec.name: gradient
                for spec, gradient in zip(step.module.graph.inputs, of_inputs, strict=True)
            }
            if self._passes:
                before = self._passes[-1]
                names = [output.name for output in before.module.graph.outputs]
                outputs = [
                    (tensor, arrived[name])
                    for name, tensor in zip(names, before.outputs, strict=True)
                    if arrived.get(name) is not None
                ]

    def set_gradients(
        self, gradients: Mapping[str, torch.Tensor], kept: Iterable[torch.Tensor] = ()
    ) -> None:
        """Add gradients to ``.grad`` as ``loss.backward()`` does; each replica gets the sum.

        The parameters take over the tensors: the caller must not use them afterwards. Tensors that
        share memory with each other or with one in ``kept`` are copied; the caller keeps ``kept``.
        """
        taken = {memory_of(tensor) for tensor in kept}
        for module in self.modules:
            for key, parameter in module.parameters_by_key().items():
                if (new := gradients.get(key)) is not None:
                    add_gradient(parameter, new, taken)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages; a replicated one once per stage."""
        for module in self.modules:
            yield from module.parameters_by_key().items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all stages, including replicas, for an optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def transfer(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the next stage receives it, detached from the previous stage's graph."""
        return value.detach()

    def _receive(self, value: Any, gradient: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self.transfer(value).requires_grad_(gradient)

    def state_dict(self) -> OrderedDict[str, torch.Tensor]:
        """Return the model's ``state_dict``, with its order of keys and the versions of its modules."""
        return fuse((module.spec, module.state_tensors()) for module in self.modules)


def fuse(
    stages: Iterable[tuple[StageSpec, Mapping[str, torch.Tensor]]],
) -> OrderedDict[str, torch.Tensor]:
    """Return one ``state_dict`` from stages and their tensors by key, with the owner's copy of replicas.

    It has ``_metadata`` like the ``state_dict`` of a module: some modules need it to load.
    """
    placed: dict[int, tuple[str, torch.Tensor]] = {}
    blocks: dict[tuple[str, ...], list[tuple[StateSpec, torch.Tensor]]] = {}
    metadata: OrderedDict[str, dict[str, int]] = OrderedDict()
    for spec, tensors in stages:
        metadata.update((path, {"version": v}) for path, v in spec.module_versions.items())
        for entry in spec.state:
            if not entry.persistent or entry.stages[0] != spec.index:
                continue
            tensor = tensors[entry.key].detach()
            if entry.rows is None:
                placed.update(_placed(entry, tensor))
            else:
                blocks.setdefault(entry.model_names, []).append((entry, tensor))
    for parts in blocks.values():
        placed.update(_placed(parts[0][0], _joined(parts)))
    placed.pop(-1, None)
    result = OrderedDict(placed[position] for position in sorted(placed))
    result._metadata = metadata  # type: ignore[attr-defined]
    return result


def _placed(entry: StateSpec, tensor: torch.Tensor) -> Iterator[tuple[int, tuple[str, torch.Tensor]]]:
    """Yield the positions of a tensor in the ``state_dict``, with its names."""
    for position, name in zip(entry.positions, entry.model_names, strict=True):
        yield position, (name, tensor)


def _joined(parts: Sequence[tuple[StateSpec, torch.Tensor]]) -> torch.Tensor:
    """Return a tensor from all blocks of its rows; raise ``FusionError`` if blocks are missing."""
    found = {entry.rows: tensor for entry, tensor in parts if entry.rows is not None}
    ordered = sorted(found, key=lambda rows: rows.first)
    total = ordered[0].total
    if [rows.first for rows in ordered] + [total] != [0] + [rows.stop for rows in ordered]:
        name = parts[0][0].model_names[0]
        raise FusionError(f"the blocks of {name} do not cover its {total} rows: a stage is missing")
    return torch.cat([found[rows] for rows in ordered])


def bind_inputs(
    signature: Sequence[InputEntry], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values by graph name for the model's arguments, given by position or by name."""
    names = [entry.name for entry in signature]
    if len(args) > len(names):
        raise StageInputError(
            f"the model takes {len(names)} inputs ({', '.join(names)}), got {len(args)}"
        )
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise StageInputError(
                f"the model has no input {name!r}; it was split with {', '.join(names)}"
            )
        if name in given:
            raise StageInputError(f"input {name!r} is given by position and by name")
        given[name] = value
    values: dict[str, Any] = {}
    for entry in signature:
        if entry.name in given:
            leaves = entry.structure.leaves_of(given[entry.name], entry.name)
            values.update(zip(entry.values, leaves, strict=True))
        elif entry.values:
            raise StageInputError(f"the model's input {entry.name!r} is missing")
    return values


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@contextlib.contextmanager
def gradients_received(parameters: Mapping[str, torch.Tensor], receive: Receive) -> Iterator[None]:
    """Pass on each gradient of a backward pass as soon as it is complete; then restore ``.grad``."""
    before = {key: parameter.grad for key, parameter in parameters.items()}
    hooks = []
    try:
        for key, parameter in parameters.items():
            parameter.grad = None
            hook = parameter.register_post_accumulate_grad_hook(_passing(key, receive))  # type: ignore[no-untyped-call]
            hooks.append(hook)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for key, parameter in parameters.items():
            parameter.grad = before[key]


def _passing(key: str, receive: Receive) -> Callable[[torch.Tensor], None]:
    def on_gradient(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        receive(key, gradient)

    return on_gradient


def _differentiate(
    ends: Sequence[tuple[torch.Tensor, torch.Tensor | None]], leaves: Sequence[Leaf]
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of ``leaves``, as ``torch.autograd.grad`` does.

    Its checks in Python take longer than the backward pass of a small layer. It is called only if a
    gradient is missing or does not fit; otherwise autograd's engine is called directly.
    """
    outputs, gradients = zip(*ends, strict=True)
    if _fit(ends) and _engine_run_backward is not None:
        return _engine_run_backward(
            outputs, gradients, False, False, tuple(leaves), True, accumulate_grad=False
        )
    mixed: Any = leaves  # torch states that they are all tensors or all edges, but takes both
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        outputs, mixed, gradients, allow_unused=True
    )
    return found


def _accumulate(
    ends: Sequence[tuple[torch.Tensor, torch.Tensor | None]], leaves: Sequence[torch.Tensor]
) -> None:
    """Add gradients to the ``.grad`` of ``leaves``, as ``torch.autograd.backward`` does."""
    outputs, gradients = zip(*ends, strict=True)
    if _fit(ends) and _engine_run_backward is not None:
        _engine_run_backward(outputs, gradients, False, False, tuple(leaves), True, accumulate_grad=True)
    else:
        torch.autograd.backward(outputs, gradients, inputs=leaves)


def _fit(ends: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
    return all(g is not None and g.shape == t.shape and g.dtype == t.dtype for t, g in ends)
