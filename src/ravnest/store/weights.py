"""Safetensors files, which are checked against the stage before a tensor is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ravnest.errors import StageFormatError
from ravnest.split.graph import StateSpec
from ravnest.store.files import size_of, write_atomically

_HEADER_LIMIT = 64 << 20


def save_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a safetensors file, each under its key."""
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    write_atomically(path, lambda target: save_file(_with_own_storage(plain), str(target)))


def load_weights(path: Path, state: tuple[StateSpec, ...]) -> dict[str, torch.Tensor]:
    """Read exactly the tensors that ``state`` lists, with its shapes and dtypes.

    Each tensor gets its own memory: in the file it may be unaligned, and kernels then round differently.
    """
    expected = {entry.key: entry for entry in state}
    _check_size(path, expected)
    try:
        with safe_open(str(path), framework="pt") as file:
            _check_keys(path, set(file.keys()), set(expected))
            tensors = {key: file.get_tensor(key).clone() for key in expected}
    except SafetensorError as error:
        raise StageFormatError(f"{path} is damaged: {error}") from error
    for key, entry in expected.items():
        found = tensors[key]
        if tuple(found.shape) != entry.shape or found.dtype != entry.dtype:
            raise StageFormatError(
                f"{path}: {key} has shape {list(found.shape)} and dtype {found.dtype}; the stage "
                f"lists {list(entry.shape)} and {entry.dtype}"
            )
        if entry.strides:
            tensors[key] = torch.empty_strided(entry.shape, entry.strides, dtype=entry.dtype).copy_(
                found
            )
    return tensors


def load_model_weights(path: Path, state: Iterable[StateSpec]) -> dict[str, torch.Tensor]:
    """Read tensors by key from a file with all tensors of a model, by their first names in the model."""
    found: dict[str, torch.Tensor] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for entry in state:
                whole = file.get_slice(entry.model_names[0])
                rows = slice(None) if entry.rows is None else slice(entry.rows.first, entry.rows.stop)
                tensor = whole[rows] if entry.shape else file.get_tensor(entry.model_names[0])
                if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                    raise StageFormatError(f"{path}: {entry.key} differs from the stage's tensor")
                found[entry.key] = tensor.clone()
    except SafetensorError as error:
        raise StageFormatError(f"{path} is damaged, or of another model: {error}") from error
    return found


def _with_own_storage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each tensor its own storage: constants may share one, which safetensors rejects."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        result[key] = tensor if whole and storage not in seen else tensor.clone()
        seen.add(storage)
    return result


def _check_size(path: Path, expected: Mapping[str, StateSpec]) -> None:
    """Check the file's length against its header and the stage, before safetensors opens it."""
    size = size_of(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        if size < 8 or header > min(_HEADER_LIMIT, size - 8):
            raise StageFormatError(f"{path} is truncated or not a safetensors file")
        try:
            json.loads(file.read(header))
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise StageFormatError(f"{path} has a damaged header: {error}") from error
    data = sum(entry.nbytes for entry in expected.values())
    if size != 8 + header + data:
        verdict = "truncated" if size < 8 + header + data else "longer than it should be"
        raise StageFormatError(
            f"{path} is {verdict}: {size} bytes, expected {8 + header + data} for the stage's tensors"
        )


def _check_keys(path: Path, found: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - found):
        raise StageFormatError(f"{path} lacks {missing[0]}")
    if extra := sorted(found - expected):
        raise StageFormatError(f"{path} has {extra[0]}, which the stage does not have")
