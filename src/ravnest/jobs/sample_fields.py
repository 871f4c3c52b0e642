"""Fields of a sample: the inputs of the model by name, and the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ravnest.errors import JobError
from ravnest.runtime.data import LABELS

Fields = dict[str, torch.Tensor]


def sample_fields(sample: Any, names: Sequence[str], what: str) -> tuple[dict[str, Any], Any]:
    """Return the inputs of a sample or a batch by name, and its target; ``what`` names it in errors."""
    takes = f"the model takes {', '.join(names)}"
    if isinstance(sample, Mapping):
        if LABELS not in sample:
            raise JobError(f"{what} are mappings without {LABELS!r}: add the target")
        if missing := [name for name in names if name not in sample]:
            raise JobError(f"{what} have {', '.join(map(str, sample))}, not {missing[0]}; {takes}")
        return {name: sample[name] for name in names}, sample[LABELS]
    if not isinstance(sample, Sequence) or isinstance(sample, str) or len(sample) < 2:
        raise JobError(
            f"{what} must be (inputs..., target) or mappings with {LABELS!r}, not {_description(sample)}"
        )
    if len(sample) - 1 != len(names):
        raise JobError(
            f"{what} have {len(sample) - 1} inputs and a target, but {takes}: give "
            "mappings with the inputs by name, or change the example inputs"
        )
    return dict(zip(names, sample[:-1], strict=True)), sample[-1]


def to_tensor(value: object, where: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense() if value.layout != torch.strided else value.detach()
    if isinstance(value, bool | int):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.get_default_dtype())
    if isinstance(value, np.ndarray | np.generic):
        try:
            return torch.as_tensor(np.ascontiguousarray(value)).reshape(value.shape)
        except TypeError as error:
            raise JobError(f"{where} cannot be converted to a tensor: {error}") from error
    raise JobError(
        f"{where} is {_description(value)}: it must be a tensor or a number; convert it in the dataset, "
        "for example an image with torchvision.transforms.ToTensor()"
    )


def _description(value: object) -> str:
    length = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{length}"
