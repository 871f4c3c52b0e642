"""Check a split: compare the stages with the model on the example batch.

The model must repeat its own results first. Then the check compares outputs in both modes and, in
training, the gradient of every parameter, over several steps in a row, and the buffers after them. It
expects bitwise equality. A difference is accepted if it is tiny, or if rounding errors of two runs of
the unsplit model are as large. If tensors are cut along their rows, sums have another order, and
rounding errors are accepted. So are those of a weight that several stages cast to bfloat16: autocast
adds its gradients in bfloat16, stages add theirs in float32.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import psutil
import torch
import xxhash

from ravnest.errors import ExactnessError, SplitError, StageInputError
from ravnest.host import large_blocks_mapped
from ravnest.split.capture import Capture
from ravnest.split.casts import keys_cast_apart
from ravnest.split.chain import bind_inputs
from ravnest.split.check_runs import Run, gradient_name, run_forward, run_model, run_stages
from ravnest.split.example import Example
from ravnest.split.graph import MODES, Mode, StageSpec
from ravnest.split.kept_model import model_kept
from ravnest.split.module import check_inputs
from ravnest.split.outside_randomness import tried_again
from ravnest.split.plain_attributes import bytes_of
from ravnest.split.repeatability import ROUNDING, check_repeatable
from ravnest.split.size_variations import smaller_examples
from ravnest.split.stored_results import StoredResults

if TYPE_CHECKING:
    from ravnest.split.split_stage import SplitStage

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6
"""Largest relative difference that is accepted, with a warning."""
_ROW_BLOCKS_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
_USUAL_ROW_BLOCKS_TOLERANCE = 1e-4
"""Largest relative difference that is accepted if tensors are cut along their rows, by the least
precise type of the parameters."""
_CAST_TOLERANCE = 4e-2
"""Largest relative difference that is accepted in gradients of weights that several stages cast."""
_SMALL_BATCH = 2
_FURTHER_SIZES = (3, 1, 2)
"""Batch sizes of further steps: a size of 1, and odd ones, often take other paths."""
_FURTHER_SECONDS = 1.0
"""Time that further steps may take, estimated from that of the example."""
_PARAMETERS_PER_OPERATION = 3
"""Parameters of a model relative to the activations of its largest operation, if the whole batch is
compared at once."""
_SMALL_OPERATION = 32 << 20
"""Activations of an operation that are never divided, in bytes."""


@dataclass(frozen=True)
class SelfCheckResult:
    """Result of comparing stages with their model."""

    batch_size: int | None
    """Number of samples that were compared; None if the check was skipped."""
    differences: Mapping[str, float]
    """Relative differences of the tensors that are not bitwise equal."""
    part_size: int | None = None
    """Largest number of samples that were compared at once."""

    @property
    def bitwise(self) -> bool:
        """True if the check ran and everything is equal to the last bit."""
        return self.batch_size is not None and not self.differences


@tried_again
def verify(
    capture: Capture,
    splits: Sequence[Sequence[SplitStage]],
    activation_bytes: int = 0,
    operation_bytes: int = 0,
) -> SelfCheckResult:
    """Compare the stages of each split with the captured model; raise ``ExactnessError`` if they differ.

    The check uses the example's batch if ``activation_bytes`` and the gradients fit in memory, else a
    batch of 2. If that does not fit either, it is skipped with a warning. The batch is compared in parts
    if ``operation_bytes``, the activations of the largest operation, are many for a model of this size.
    """
    example = _fitting_example(capture, activation_bytes)
    if example is None:
        return SelfCheckResult(None, {})
    parts = _parts(capture, splits, example, operation_bytes)
    with large_blocks_mapped():
        _check_repeatable(capture, splits, example, parts)
        started = time.monotonic()
        try:
            differences = _compare_steps(capture, splits, parts)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, SplitError):
                raise
            if len(parts) == 1:
                _refuse_failing(capture, example, error)
                raise
            logger.info("the split model is checked on the whole example: parts of it fail: %s", error)
            parts = [example]
            differences = _compare_steps(capture, splits, parts)
        seconds = time.monotonic() - started
        differences |= _compare_sizes(capture, splits, example, parts, seconds)
        differences |= _compare_lengths(capture, splits, example, seconds)
    if differences:
        _log_differences(capture, differences)
    sizes = [part.batch_size for part in parts if part.batch_size is not None]
    return SelfCheckResult(example.batch_size, differences, max(sizes, default=None))


def _parts(
    capture: Capture,
    splits: Sequence[Sequence[SplitStage]],
    example: Example,
    operation_bytes: int,
) -> list[Example]:
    """Return the example in the fewest parts that keep operations small, each of 2 samples or more."""
    rows = example.batch_size
    limit = max(_parameter_bytes(capture) // _PARAMETERS_PER_OPERATION, _SMALL_OPERATION)
    if rows is None or capture.fixed_batch or operation_bytes <= limit:
        return [example]
    at_once = max(rows * limit // operation_bytes, _SMALL_BATCH)
    for count in range(min(-(-rows // at_once), rows // _SMALL_BATCH), 1, -1):
        bounds = [rows * index // count for index in range(count + 1)]
        parts = [example.narrowed(end - begin, begin) for begin, end in pairwise(bounds)]
        if all(_accepts(splits[0][0].spec, part) for part in parts):
            return parts
    return [example]


def _check_repeatable(
    capture: Capture,
    splits: Sequence[Sequence[SplitStage]],
    example: Example,
    parts: Sequence[Example],
) -> None:
    """Check that the model repeats its results, with 2 samples if it takes such a batch."""
    small = parts[0]
    if (example.batch_size or 0) > _SMALL_BATCH:
        two = example.narrowed(_SMALL_BATCH)
        small = two if _accepts(splits[0][0].spec, two) else small
    try:
        check_repeatable(capture, small)
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, SplitError) or small is example:
            raise
        check_repeatable(capture, example)


def _refuse_failing(capture: Capture, example: Example, error: Exception) -> None:
    """Raise ``SplitError`` if the unsplit model fails to train on the example, with its own message."""
    try:
        run_model(capture, [example], "train", lambda _name, _tensor: None)
    except (RuntimeError, ValueError, IndexError) as own:
        raise SplitError(
            "the model itself fails in a training step on the example inputs, before it is split: "
            f"{own}. Correct the model; a tensor that is used and then written in place can be replaced "
            "by a new one (self.mean = ... instead of self.mean.mul_(...))"
        ) from error


def _compare_sizes(
    capture: Capture,
    splits: Sequence[Sequence[SplitStage]],
    example: Example,
    parts: Sequence[Example],
    seconds: float,
) -> dict[str, float]:
    """Compare further steps in a row, with batches of other sizes, as far as time allows.

    ``seconds`` is the time that the example took.
    """
    rows = example.batch_size
    if rows is None or capture.fixed_batch:
        return {}
    done = {part.batch_size for part in parts}
    steps: list[Example] = []
    samples = 0
    for size in _FURTHER_SIZES:
        small = example.resized(size)
        slow = seconds * (samples + size) / rows > _FURTHER_SECONDS
        if size in done or slow or not _accepts(splits[0][0].spec, small):
            continue
        steps.append(small)
        samples += size
    steps = [step for step in steps if _runs(capture, step)]
    found: dict[str, float] = {}
    try:
        for run in ([s for s in steps if s.batch_size != 1], [s for s in steps if s.batch_size == 1]):
            found |= _compare_steps(capture, splits, run) if run else {}
    except _OtherGradientError as error:
        if not run or run[0].batch_size != 1:
            raise
        # Batch norm of torch 2.13 computes a wrong gradient of one sample, if that of its output has
        # its channels last; stages pass gradients on in the usual layout.
        logger.warning(
            "batches of 1 sample: %s. The outputs are equal, and torch computes wrong gradients of a "
            "single sample in some layouts. Leave such batches out (drop_last=True)",
            error,
        )
    return found


def _compare_lengths(
    capture: Capture, splits: Sequence[Sequence[SplitStage]], example: Example, seconds: float
) -> dict[str, float]:
    """Compare steps with other sizes in the dimensions that vary: one, and more if time allows."""
    steps: list[Example] = []
    for smaller in smaller_examples(capture, example):
        slow = bool(steps) and seconds * (len(steps) + 1) > _FURTHER_SECONDS
        if not slow and _accepts(splits[0][0].spec, smaller) and _runs(capture, smaller):
            steps.append(smaller)
    return _compare_steps(capture, splits, steps) if steps else {}


class _OtherGradientError(ExactnessError):
    """Outputs are equal, and a gradient differs."""


def _runs(capture: Capture, example: Example) -> bool:
    """Return True if the unsplit model takes this batch; what it refuses need not be compared."""
    try:
        with model_kept(capture.model):
            for mode in MODES:
                run_forward(capture, example, mode)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        shapes = [list(tensor.shape) for tensor in example.tensors]
        logger.info("batches of shape %s are not compared: %s", shapes, error)
        return False
    return True


def _accepts(spec: StageSpec, example: Example) -> bool:
    """Return True if the first stage was captured for batches of this size."""
    args, kwargs = example.rebuild(example.tensors)
    values = bind_inputs(spec.signature, args, kwargs)
    try:
        for graph in spec.graphs.values():
            check_inputs(graph, [values[value.name] for value in graph.inputs])
    except StageInputError:
        return False
    return True


def _compare_steps(
    capture: Capture, splits: Sequence[Sequence[SplitStage]], steps: Sequence[Example]
) -> dict[str, float]:
    """Return the difference of each tensor in any of the steps, which follow each other."""
    return {
        name: difference
        for mode in MODES
        for name, difference in _compare_mode(capture, splits, steps, mode).items()
    }


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
    if capture.precision is not None and differences[worst] > TOLERANCE:
        logger.info(
            "several stages cast the same weights to bfloat16: %d gradients differ from those of the "
            "unsplit model, by at most %.1e (relative) in %s, which is rounding of bfloat16",
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
    types |= set() if capture.precision is None else {torch.bfloat16}
    return max([_ROW_BLOCKS_TOLERANCE.get(t, 0.0) for t in types] + [_USUAL_ROW_BLOCKS_TOLERANCE])


def _fitting_example(capture: Capture, activation_bytes: int) -> Example | None:
    example = capture.example
    gradients = 2 * _parameter_bytes(capture, trained=True)
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


def _parameter_bytes(capture: Capture, *, trained: bool = False) -> int:
    tensors = [e.tensor for e in capture.state.tensors.values() if e.kind == "parameter"]
    return sum(t.numel() * t.element_size() for t in tensors if t.requires_grad or not trained)


def _compare_mode(
    capture: Capture, splits: Sequence[Sequence[SplitStage]], steps: Sequence[Example], mode: Mode
) -> dict[str, float]:
    unsplit = partial(run_model, capture, steps, mode)
    expected = None if _row_blocks(capture) else _fingerprints(unsplit)
    found: dict[str, float] = {}
    for stages in splits:
        split = partial(run_stages, capture, stages, steps, mode)
        if expected is not None and _fingerprints(split) == expected:
            continue
        with StoredResults.of(unsplit) as results:
            differences = results.differences(split)
            tolerance = _tolerance(capture)
            rounded = {gradient_name(key) for key in keys_cast_apart([stage.spec for stage in stages])}
            large = {
                name: difference
                for name, difference in differences.items()
                if difference > (_CAST_TOLERANCE if _of_any_step(name) in rounded else tolerance)
            }
            if large:
                _refuse_large(large, results.differences(unsplit), tolerance, mode)
        found |= {f"{name} ({mode})": difference for name, difference in differences.items()}
    return found


def _of_any_step(name: str) -> str:
    """Return the name of a result without its step."""
    return name.partition(" (step ")[0]


def _fingerprints(run: Run) -> dict[str, tuple[object, ...]]:
    """Return shape, dtype and digest of each result that is not zero.

    Results are not kept, so that a check takes the memory of a few of them.
    """
    found: dict[str, tuple[object, ...]] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        if bool(tensor.any()):
            digest = xxhash.xxh3_128(bytes_of(tensor).numpy().data).digest()
            found[name] = (tuple(tensor.shape), tensor.dtype, digest)

    run(keep)
    return found


def _refuse_large(
    differences: dict[str, float], noise: dict[str, float], tolerance: float, mode: Mode
) -> None:
    for name, difference in differences.items():
        if difference > max(tolerance, min(noise.get(name, 0.0), ROUNDING)):
            kind = _OtherGradientError if name.startswith("the gradient of") else ExactnessError
            raise kind(
                f"the stages do not compute what the model computes: in {mode} mode {name} is the "
                f"first tensor that differs, by {difference:.1e} relative to its largest value. Hooks "
                "on tensors or modules, code that keeps state outside parameters and buffers, or "
                "random numbers from a source other than torch's default generator are possible "
                "reasons"
            )
