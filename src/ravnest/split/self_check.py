"""Check a split: compare the stages with the model on the example batch.

The check compares outputs in both modes and, in training, the gradient of every parameter. It expects
bitwise equality. A difference is accepted if it is tiny, or if two runs of the unsplit model differ as
much. If tensors are cut along their rows, sums have another order, and rounding errors are accepted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
import xxhash
from torch import nn

from ravnest.errors import ExactnessError
from ravnest.split.capture import Capture, mode_of
from ravnest.split.chain import Chain
from ravnest.split.example import Example
from ravnest.split.graph import MODES, Mode
from ravnest.split.module import StageModule
from ravnest.split.structure import flatten

if TYPE_CHECKING:
    from ravnest.split.splitter import SplitStage

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6
"""Largest relative difference that is accepted, with a warning."""
_ROW_BLOCKS_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
_USUAL_ROW_BLOCKS_TOLERANCE = 1e-4
"""Largest relative difference that is accepted if tensors are cut along their rows, by the least
precise type of the parameters."""
_NEAR_ZERO = 1e-4
"""Gradients below this fraction of the model's largest are compared relative to the largest."""
_SEED = 20_240_229
_SMALL_BATCH = 2

Keep = Callable[[str, torch.Tensor], None]
"""Function that is called with the name and the value of each result."""
Results = dict[str, torch.Tensor]
"""Tensors by the name that reports use."""


@dataclass(frozen=True)
class SelfCheckResult:
    """Result of comparing stages with their model."""

    batch_size: int | None
    """Batch size of the comparison; None if the check was skipped."""
    differences: Mapping[str, float]
    """Relative differences of the tensors that are not bitwise equal."""

    @property
    def bitwise(self) -> bool:
        """True if the check ran and everything is equal to the last bit."""
        return self.batch_size is not None and not self.differences


def verify(
    capture: Capture, splits: Sequence[Sequence[SplitStage]], activation_bytes: int = 0
) -> SelfCheckResult:
    """Compare the stages of each split with the captured model; raise ``ExactnessError`` if they differ.

    The check uses the example's batch if ``activation_bytes`` and the gradients fit in memory, else a
    batch of 2. If that does not fit either, it is skipped with a warning.
    """
    example = _fitting_example(capture, activation_bytes)
    if example is None:
        return SelfCheckResult(None, {})
    differences: dict[str, float] = {}
    with _fast_path_off():
        for mode in MODES:
            differences |= _compare_mode(capture, splits, example, mode)
    if differences:
        _log_differences(capture, differences)
    return SelfCheckResult(example.batch_size, differences)


def _log_differences(capture: Capture, differences: Mapping[str, float]) -> None:
    worst = max(differences, key=lambda name: differences[name])
    if _row_blocks(capture):
        logger.info(
            "tensors are cut along their rows: %d tensors differ from those of the unsplit model, by at "
            "most %.1e (relative) in %s, which is rounding",
            len(differences),
            differences[worst],
            worst,
        )
        return
    logger.warning(
        "split and unsplit model differ in %d tensors, by at most %.1e (relative) in %s: within the "
        "rounding error of float32. The usual reason is a library that takes another code path "
        "while a model is captured",
        len(differences),
        differences[worst],
        worst,
    )


def _row_blocks(capture: Capture) -> bool:
    """Return True if tensors of the captured model are cut along their rows."""
    return any(entry.rows is not None for entry in capture.state.tensors.values())


def _tolerance(capture: Capture) -> float:
    if not _row_blocks(capture):
        return TOLERANCE
    types = {entry.tensor.dtype for entry in capture.state.tensors.values()}
    return max([_ROW_BLOCKS_TOLERANCE.get(t, 0.0) for t in types] + [_USUAL_ROW_BLOCKS_TOLERANCE])


def _fitting_example(capture: Capture, activation_bytes: int) -> Example | None:
    example = capture.example
    tensors = [e.tensor for e in capture.state.tensors.values() if e.kind == "parameter"]
    gradients = 2 * sum(t.numel() * t.element_size() for t in tensors if t.requires_grad)
    free = int(psutil.virtual_memory().available * 0.8)
    if gradients + activation_bytes <= free:
        return example
    batch = example.batch_size or _SMALL_BATCH
    small = gradients + activation_bytes * _SMALL_BATCH // batch
    if small <= free and not capture.fixed_batch and batch > _SMALL_BATCH:
        logger.info(
            "the check of the split model uses batch size 2: batch size %d does not fit in memory", batch
        )
        return example.narrowed(_SMALL_BATCH)
    logger.warning(
        "the split model is not checked against the unsplit one: the check needs %.1f GB of memory, "
        "%.1f GB are free",
        (gradients + activation_bytes) / 1e9,
        free / 1e9,
    )
    return None


def _compare_mode(
    capture: Capture, splits: Sequence[Sequence[SplitStage]], example: Example, mode: Mode
) -> dict[str, float]:
    def unsplit(keep: Keep) -> None:
        with mode_of(capture.model, mode), torch.set_grad_enabled(mode == "train"):
            _run_model(capture, example, keep)

    def chained(stages: Sequence[SplitStage], keep: Keep) -> None:
        chain = Chain(_module(stage) for stage in stages).train(mode == "train")
        with torch.set_grad_enabled(mode == "train"):
            _run_chain(capture, chain, example, keep)

    expected = None if _row_blocks(capture) else _fingerprints(capture, unsplit)
    found: dict[str, float] = {}
    for stages in splits:
        split = partial(chained, stages)
        if expected is not None and _fingerprints(capture, split) == expected:
            continue
        tensors = _tensors(capture, unsplit)
        differences = _differences(capture, tensors, split)
        tolerance = _tolerance(capture)
        if any(difference > tolerance for difference in differences.values()):
            _refuse_large(differences, _differences(capture, tensors, unsplit), tolerance, mode)
        found |= {f"{name} ({mode})": difference for name, difference in differences.items()}
    return found


def _fingerprints(capture: Capture, run: Callable[[Keep], None]) -> dict[str, tuple[object, ...]]:
    """Return shape, dtype and digest of each result that is not zero.

    Results are not kept, so that a check takes the memory of a few of them.
    """
    found: dict[str, tuple[object, ...]] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        if bool(tensor.any()):
            plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest = xxhash.xxh3_128(plain.numpy().data).digest()
            found[name] = (tuple(tensor.shape), tensor.dtype, digest)

    _seeded(capture, partial(run, keep))
    return found


def _tensors(capture: Capture, run: Callable[[Keep], None]) -> Results:
    """Return the results themselves."""
    found: Results = {}
    _seeded(capture, partial(run, found.__setitem__))
    return found


def _refuse_large(
    differences: dict[str, float], noise: dict[str, float], tolerance: float, mode: Mode
) -> None:
    for name, difference in differences.items():
        if difference > max(tolerance, noise.get(name, 0.0)):
            raise ExactnessError(
                f"the stages do not compute what the model computes: in {mode} mode {name} is the "
                f"first tensor that differs, by {difference:.1e} relative to its largest value. Hooks "
                "on tensors or modules, code that keeps state outside parameters and buffers, or "
                "random numbers from a source other than torch's default generator are possible "
                "reasons"
            )


def _module(stage: SplitStage) -> StageModule:
    """Return the stage as a module that shares the model's parameters but has its own buffers."""
    kinds = {entry.key: entry.kind for entry in stage.spec.state}
    tensors = {k: t if kinds[k] == "parameter" else t.clone() for k, t in stage.tensors.items()}
    return StageModule(stage.spec, tensors, _device(tensors.values()))


def _device(tensors: Any) -> torch.device:
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _run_model(capture: Capture, example: Example, keep: Keep) -> None:
    args, kwargs = example.rebuild([tensor.clone() for tensor in example.tensors])
    outputs = _named_outputs(capture.model(*args, **kwargs))
    for name, tensor in outputs.items():
        keep(name, tensor.detach())
    ends = _ends(outputs)
    trainable = _trainable(capture)
    if ends and trainable:
        with _gradients_passed_on(trainable, keep):
            torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])


@contextlib.contextmanager
def _gradients_passed_on(parameters: Mapping[str, torch.Tensor], keep: Keep) -> Iterator[None]:
    """Pass on each gradient of a backward pass as soon as it is complete; restore the user's own."""
    before = {key: parameter.grad for key, parameter in parameters.items()}

    def passing(key: str) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            keep(_gradient_name(key), _dense(parameter.grad))
            parameter.grad = None

        return on_gradient

    hooks = []
    try:
        for key, parameter in parameters.items():
            parameter.grad = None
            hook = parameter.register_post_accumulate_grad_hook(passing(key))  # type: ignore[no-untyped-call]
            hooks.append(hook)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for key, parameter in parameters.items():
            parameter.grad = before[key]


def _trainable(capture: Capture) -> dict[str, torch.Tensor]:
    """Return the trained parameters of the model by key; a tensor that is cut into blocks as a whole."""
    own = dict(capture.model.named_parameters(remove_duplicate=False))
    entries = [e for e in capture.state.tensors.values() if e.kind == "parameter"]
    keys = {entry.model_names[0]: entry for entry in entries if entry.tensor.requires_grad}
    return {key: own[key] if entry.rows is not None else entry.tensor for key, entry in keys.items()}


def _run_chain(capture: Capture, chain: Chain, example: Example, keep: Keep) -> None:
    args, kwargs = example.rebuild([tensor.clone() for tensor in example.tensors])
    outputs = _named_outputs(chain(*args, **kwargs))
    for name, tensor in outputs.items():
        keep(name, tensor.detach())
    blocks: dict[str, dict[int, torch.Tensor]] = {}
    for key, gradient in chain.each_gradient(_ends(outputs)):
        entry = capture.state.tensors[key]
        if entry.rows is None:
            keep(_gradient_name(key), _dense(gradient))
            continue
        whole = entry.model_names[0]
        parts = blocks.setdefault(whole, {})
        parts[entry.rows.first] = _dense(gradient)
        if sum(len(part) for part in parts.values()) == entry.rows.total:
            del blocks[whole]
            keep(_gradient_name(whole), torch.cat([parts[first] for first in sorted(parts)]))


def _gradient_name(key: str) -> str:
    return f"the gradient of {key}"


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _named_outputs(output: Any) -> Results:
    leaves, structure = flatten(output, "output", lambda _path, _value: None)
    paths = structure.leaf_paths("output")
    return {p: leaf for p, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)}


def _ends(outputs: Results) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs that need a gradient, each with a fixed pseudo-random gradient."""
    generator = torch.Generator().manual_seed(_SEED)
    ends: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in outputs.values():
        if tensor.requires_grad and torch.is_grad_enabled():
            noise = torch.rand(tensor.shape, generator=generator) - 0.5
            ends.append((tensor, noise.to(tensor.dtype).to(tensor.device)))
    return ends


def _differences(capture: Capture, expected: Results, run: Callable[[Keep], None]) -> dict[str, float]:
    """Return the relative difference of each result that is not bitwise equal, in program order."""
    largest = max((_largest(t) for n, t in expected.items() if n.startswith("the gr")), default=0.0)
    found: dict[str, float] = {}
    missing = {name for name, tensor in expected.items() if bool(tensor.any())}

    def compare(name: str, tensor: torch.Tensor) -> None:
        missing.discard(name)
        difference = _difference(expected.get(name), tensor, largest)
        if difference is not None:
            found[name] = difference

    _seeded(capture, partial(run, compare))
    found |= dict.fromkeys(missing, float("inf"))
    return {name: found[name] for name in (*expected, *found) if name in found}


def _difference(expected: torch.Tensor | None, actual: torch.Tensor, largest: float) -> float | None:
    """Return the difference relative to the largest value; None if both have the same bits."""
    if expected is None:
        return float("inf") if bool(actual.any()) else None
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return float("inf")
    if _same_bits(expected, actual):
        return None
    scale = max(_largest(expected), _NEAR_ZERO * largest, torch.finfo(torch.float32).tiny)
    return _largest(expected.double() - actual.double()) / scale


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _largest(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    values = tensor.detach().abs().double()
    return float(torch.nan_to_num(values, nan=float("inf")).max())


def _seeded(capture: Capture, run: Callable[[], None]) -> None:
    """Run with a fixed seed, and restore the random state and the model's buffers afterwards."""
    devices = {e.tensor.device for e in capture.state.tensors.values()} - {torch.device("cpu")}
    with torch.random.fork_rng(devices=list(devices)), _buffers_kept(capture.model):
        torch.manual_seed(_SEED)
        run()


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers afterwards: a training forward writes to them or replaces them."""
    before = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                module._buffers[name] = buffer
                if buffer is not None and values is not None:
                    buffer.copy_(values)


@contextlib.contextmanager
def _fast_path_off() -> Iterator[None]:
    """Switch off torch's fused encoder path, which rounds differently from the path with autograd."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
