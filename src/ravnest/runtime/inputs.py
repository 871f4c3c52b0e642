"""Assignment of tensors to the model's inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ravnest.errors import StageInputError
from ravnest.split.chain import bind_inputs
from ravnest.split.graph import InputEntry

_GRAPH_NAME = re.compile(r"l_(\w+)_")


def bind(signature: Sequence[InputEntry], tensors: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the first stage from the arguments of ``forward_compute``.

    ``tensors``, one or several, are assigned in the order of the signature to the inputs that are not
    given by name. ``l_<name>_`` is an alias of ``<name>``.
    """
    names = {entry.name for entry in signature}
    given = {_plain(name, names): value for name, value in named.items()}
    open_ = [entry for entry in signature if entry.name not in given]
    several = _several(tensors, open_)
    if len(several) > len(open_):
        raise StageInputError(
            f"forward_compute got {len(several)} tensors for {len(open_)} inputs: "
            f"{', '.join(entry.name for entry in open_) or 'all inputs are given by name'}"
        )
    given |= {entry.name: value for entry, value in zip(open_, several, strict=False)}
    return bind_inputs(signature, (), given)


def inputs_in(batch: Any, signature: Sequence[InputEntry]) -> tuple[Any, dict[str, Any]]:
    """Return the model's inputs in a loader's batch, by position and by name, without targets.

    From a mapping: the entries that are inputs of the model. From a sequence: all elements but the last,
    which are the targets. Anything else is the input.
    """
    if isinstance(batch, Mapping):
        known = {entry.name for entry in signature}
        return None, {name: value for name, value in batch.items() if name in known}
    if isinstance(batch, Sequence):
        return list(batch[:-1] if len(batch) > 1 else batch), {}
    return batch, {}


def _plain(name: str, names: set[str]) -> str:
    match = _GRAPH_NAME.fullmatch(name)
    return match[1] if name not in names and match and match[1] in names else name


def _several(tensors: Any, open_: Sequence[InputEntry]) -> Sequence[Any]:
    if tensors is None:
        return ()
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, list | tuple):
        return (tensors,)
    nested = len(open_) == 1 and open_[0].structure.kind != "leaf"
    if nested and not (len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor)):
        return (tensors,)
    return tensors
