"""Weights, buffers and optimizer state in the checkpoints of all stages of a cluster, by model name.

A tensor of the model may be cut along its rows, into blocks that several stages have: any range of rows
can be read from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from ravnest.errors import StageFormatError
from ravnest.split.graph import StateSpec
from ravnest.store.checkpoint import DTYPES, OPTIMIZER, STATE, CheckpointManifest, LazyTensor
from ravnest.store.checkpoint_progress import CutProgress
from ravnest.store.checkpoint_sets import CheckpointSet, StageCheckpoint
from ravnest.store.plain_data import encode

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
T = TypeVar("T")


@dataclass(frozen=True)
class _Block:
    """Rows of a weight or buffer that an old stage has; the whole tensor, if it is not cut."""

    stage: int
    key: str
    """Name in the old stage."""
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    optimizer_fields: tuple[str, ...]
    plain_fields: Mapping[str, Any]

    @property
    def stop(self) -> int:
        return self.first + (self.shape[0] if self.shape else 1)


class ClusterState:
    """Weights and buffers of the old stages, by name in the model."""

    def __init__(self, old: CheckpointSet, progress: CutProgress, stack: ExitStack) -> None:
        """``stack`` closes the files of tensors, which are read when they are needed."""
        self._files = [_open(stack, checkpoint) for checkpoint in old.stages]
        self._blocks: dict[str, dict[int, _Block]] = {}
        self._used: set[str] = set()
        for stage, (checkpoint, file) in enumerate(zip(old.stages, self._files, strict=True)):
            fields = _optimizer_fields(file.keys(), checkpoint.manifest)
            for key, stored in checkpoint.manifest.tensors.items():
                shape, dtype = self.layout(stage, STATE + key)
                cut = stored.rows is not None or stored.first != 0
                if cut and (stored.first < 0 or shape[:1] != (stored.rows,)):
                    raise StageFormatError(f"{checkpoint.tensors}: the rows of {key} do not fit it")
                plain = progress.fields[stage].get(key, {})
                block = _Block(
                    stage, key, stored.first, shape, dtype, tuple(sorted(fields.get(key, ()))), plain
                )
                # Several stages can hold a buffer; the first of them owns it.
                self._blocks.setdefault(stored.name, {}).setdefault(stored.first, block)

    def rows_of(self, entry: StateSpec) -> StoredRows:
        """Return the blocks that make up a weight or buffer of a new stage, or its rows."""
        name = next((each for each in entry.model_names if each in self._blocks), None)
        if name is None:
            raise StageFormatError(
                f"the checkpoint lacks {entry.model_names[0]}, which the model trains: it is of another "
                "model, or the weight was frozen"
            )
        self._used.add(name)
        blocks = sorted(self._blocks[name].values(), key=lambda block: block.first)
        first, stop, total = _range_of(entry)
        covered = [block.first for block in blocks[1:]] + [total] == [block.stop for block in blocks]
        if blocks[0].first != 0 or not covered:
            raise StageFormatError(f"the checkpoint has {name} with another number of rows")
        for block in blocks:
            if (block.shape[1:], block.dtype) != (entry.shape[1:], entry.dtype) or (
                bool(block.shape) != bool(entry.shape)
            ):
                raise StageFormatError(
                    f"the checkpoint has {name} with another shape or dtype: {list(block.shape)} and "
                    f"{block.dtype}; the model has {list(entry.shape)} and {entry.dtype}"
                )
        parts = [block for block in blocks if block.first < stop and block.stop > first]
        return StoredRows(self, entry, tuple(parts or blocks[:1]), first, stop)

    def check_all_used(self) -> None:
        """Raise ``StageFormatError`` if no new stage has a weight that was trained."""
        if unused := sorted(self._blocks.keys() - self._used):
            raise StageFormatError(
                f"the checkpoint has {unused[0]}, which the model does not have or does not train"
            )

    def layout(self, stage: int, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor in an old stage's file."""
        try:
            found = self._files[stage].get_slice(name)
        except SafetensorError as error:
            raise StageFormatError(f"the checkpoint of stage {stage} lacks {name}") from error
        if found.get_dtype() not in _BY_NAME:
            raise StageFormatError(f"{name} has dtype {found.get_dtype()}, which cannot be stored")
        return tuple(found.get_shape()), _BY_NAME[found.get_dtype()]

    def load(self, stage: int, name: str) -> torch.Tensor:
        """Return a tensor of an old stage."""
        tensor: torch.Tensor = self._files[stage].get_tensor(name)
        return tensor

    def load_rows(self, stage: int, name: str, first: int, stop: int) -> torch.Tensor:
        """Return rows of a tensor of an old stage."""
        tensor: torch.Tensor = self._files[stage].get_slice(name)[first:stop]
        return tensor


@dataclass(frozen=True)
class StoredRows:
    """Rows ``first`` to ``stop - 1`` of a tensor, in the blocks of the old stages that have them."""

    state: ClusterState
    entry: StateSpec
    blocks: tuple[_Block, ...]
    first: int
    stop: int

    @property
    def _as_stored(self) -> bool:
        """True if an old stage has exactly these rows."""
        return [(block.first, block.stop) for block in self.blocks] == [(self.first, self.stop)]

    def weight(self) -> LazyTensor:
        """Return the weight or buffer itself."""
        return self._tensor([STATE + block.key for block in self.blocks])

    @property
    def optimizer_fields(self) -> tuple[str, ...]:
        """Names of the optimizer's tensors for the weight."""
        return self._same([block.optimizer_fields for block in self.blocks])

    @property
    def plain_fields(self) -> Mapping[str, Any]:
        """Other values of the optimizer for the weight."""
        values = [block.plain_fields for block in self.blocks]
        self._same([encode(each) for each in values])
        return values[0]

    def optimizer_tensor(self, field: str) -> LazyTensor:
        """Return a tensor of the optimizer: the same rows, or a number that all blocks share."""
        names = [f"{OPTIMIZER}{block.key}/{field}" for block in self.blocks]
        stage = self.blocks[0].stage
        shape, dtype = self.state.layout(stage, names[0])
        if shape or self._as_stored:
            return self._tensor(names)
        numbers = [
            self.state.load(block.stage, name) for block, name in zip(self.blocks, names, strict=True)
        ]
        self._same([(number.dtype, number.tolist()) for number in numbers])
        return LazyTensor(dtype, (), partial(self.state.load, stage, names[0]))

    def _tensor(self, names: Sequence[str]) -> LazyTensor:
        """Return a tensor that has a row for each row of the weight, from its part in each block."""
        shape, dtype = self.state.layout(self.blocks[0].stage, names[0])
        if self._as_stored:
            return LazyTensor(dtype, shape, partial(self.state.load, self.blocks[0].stage, names[0]))
        for block, name in zip(self.blocks, names, strict=True):
            found, dtype_found = self.state.layout(block.stage, name)
            fits = found[:1] == block.shape[:1] and found[1:] == shape[1:]
            if not fits or dtype_found != dtype:
                raise StageFormatError(
                    f"the optimizer's state of {self.entry.model_names[0]} cannot be cut along rows: "
                    f"{name} has shape {list(found)}"
                )
        shape = (self.stop - self.first, *shape[1:])
        return LazyTensor(dtype, shape, partial(self._join, tuple(names), shape, dtype))

    def _join(self, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        joined = torch.empty(shape, dtype=dtype)
        for block, name in zip(self.blocks, names, strict=True):
            first, stop = max(block.first, self.first), min(block.stop, self.stop)
            rows = self.state.load_rows(block.stage, name, first - block.first, stop - block.first)
            joined[first - self.first : stop - self.first] = rows
        return joined

    def _same(self, values: Sequence[T]) -> T:
        """Return what all blocks share."""
        if any(value != values[0] for value in values[1:]):
            raise StageFormatError(
                f"the blocks of {self.entry.model_names[0]} in the checkpoint differ in the optimizer's "
                "state, so that they cannot be joined"
            )
        return values[0]


def _range_of(entry: StateSpec) -> tuple[int, int, int]:
    """Return the first row, the row after the last one, and the rows of the whole tensor."""
    if entry.rows is not None:
        return entry.rows.first, entry.rows.stop, entry.rows.total
    count = entry.shape[0] if entry.shape else 1
    return 0, count, count


def _optimizer_fields(names: Iterable[str], manifest: CheckpointManifest) -> dict[str, set[str]]:
    """Return the names of the optimizer's tensors, by key of the weight."""
    fields: dict[str, set[str]] = {}
    for name in names:
        if name.startswith(OPTIMIZER):
            key, _, field = name.removeprefix(OPTIMIZER).rpartition("/")
            if key not in manifest.tensors:
                raise StageFormatError(f"the checkpoint of stage {manifest.stage} has an unknown {name}")
            fields.setdefault(key, set()).add(field)
    return fields


def _open(stack: ExitStack, checkpoint: StageCheckpoint) -> Any:
    try:
        return stack.enter_context(safe_open(str(checkpoint.tensors), framework="pt"))
    except SafetensorError as error:
        raise StageFormatError(f"{checkpoint.tensors} is damaged: {error}") from error
