"""Files of a spot check: an output as the next stage received it, and what it was computed from.

Both are safetensors files that providers write and the server reads; nothing in them is believed.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ravnest.errors import StageFormatError
from ravnest.store.checkpoint import write_tensor_file
from ravnest.types import is_dense

VALUE, STATE = "value/", "state/"
"""Prefixes of the tensors' names: activations, and weights, buffers and constants."""
_NUMBERS, _STRIDES, _ARITHMETIC = "numbers", "strides", "arithmetic"
_LONGEST_TEXT = 1 << 20
_LARGEST_STRIDE = 1 << 48
_LONGEST_NAME = 32
_FOLDER = "spot_checks"
"""Folder of the files, beside a node's checkpoints."""


@dataclass(frozen=True)
class ForwardEvidence:
    """Values of one micro-batch: an output that was received, or inputs with the state of a stage."""

    values: Mapping[str, Any]
    """Tensors and numbers by name."""
    state: Mapping[str, torch.Tensor]
    """Weights, buffers and constants by key; empty for an output that was received."""
    arithmetic: str = ""
    """Library and processor that computed; random numbers are the same only on equal ones."""


def check_path(folder: Path, check: str, part: str) -> Path:
    """Return the path of a file of a check below the folder of a node's checkpoints."""
    return folder / _FOLDER / f"{check}.{part}.safetensors"


def is_check_name(name: str) -> bool:
    """Return whether a name, which comes from another node, is that of a check."""
    return 0 < len(name) <= _LONGEST_NAME and name.isalnum() and name.isascii()


def own_arithmetic(device: torch.device | str = "cpu") -> str:
    """Return the name of the arithmetic of this process."""
    library = "mkl" if torch.backends.mkl.is_available() else "plain"  # type: ignore[no-untyped-call]
    release = torch.__version__.split("+")[0]
    return f"torch {release} {library} {platform.machine()} {torch.device(device).type}"


def write_evidence(path: Path, evidence: ForwardEvidence) -> None:
    """Write a file; each tensor is copied from its own memory."""
    tensors = {
        VALUE + name: value for name, value in evidence.values.items() if isinstance(value, torch.Tensor)
    }
    numbers = {
        name: value for name, value in evidence.values.items() if not isinstance(value, torch.Tensor)
    }
    strides = {
        name.removeprefix(VALUE): tensor.stride()
        for name, tensor in tensors.items()
        if not tensor.is_contiguous() and is_dense(tensor.shape, tensor.stride())
    }
    tensors |= {STATE + key: tensor for key, tensor in evidence.state.items()}
    metadata = {
        _NUMBERS: json.dumps(numbers),
        _STRIDES: json.dumps(strides),
        _ARITHMETIC: evidence.arithmetic,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    try:
        write_tensor_file(temporary, tensors, metadata)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_evidence(path: Path) -> ForwardEvidence:
    """Read a file; ``StageFormatError`` if it is not one. Each tensor gets memory of its own."""
    values: dict[str, Any] = {}
    state: dict[str, torch.Tensor] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name).clone()
                if name.startswith(STATE):
                    state[name.removeprefix(STATE)] = tensor
                else:
                    values[name.removeprefix(VALUE)] = tensor
    except (SafetensorError, OSError) as error:
        raise StageFormatError(f"a file of a check is damaged: {error}") from error
    for name, strides in _texts(metadata, _STRIDES).items():
        if name in values:
            values[name] = _laid_out(values[name], strides)
    numbers = _texts(metadata, _NUMBERS)
    if not all(isinstance(each, int | float) for each in numbers.values()):
        raise StageFormatError("a file of a check has damaged numbers")
    return ForwardEvidence({**values, **numbers}, state, metadata.get(_ARITHMETIC, "")[:200])


def _texts(metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return a JSON object of the header."""
    text = metadata.get(name, "{}")
    try:
        found = json.loads(text) if len(text) <= _LONGEST_TEXT else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StageFormatError(f"a file of a check has damaged {name}")
    return found


def _laid_out(tensor: torch.Tensor, strides: Any) -> torch.Tensor:
    """Return a tensor with these strides, as it was in memory; codecs and kernels depend on them."""
    if (
        not isinstance(strides, list)
        or not all(isinstance(each, int) and 0 <= each < _LARGEST_STRIDE for each in strides)
        or len(strides) != tensor.dim()
        or not is_dense(tensor.shape, tuple(strides))
    ):
        raise StageFormatError("a file of a check has damaged strides")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
