"""Parameters, buffers and constants of a model under stable keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ravnest.errors import SplitError
from ravnest.split.graph import MAX_MODULE_VERSION, Kind, Mode, RowBlock


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the model with all its names, or a block of its rows."""

    tensor: torch.Tensor
    kind: Kind
    persistent: bool
    names: tuple[str, ...]
    rows: RowBlock | None = None
    """Rows of the model's tensor that this is; None for a whole tensor."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the whole tensor."""
        return self.names if self.rows is None else tuple(map(self.rows.name_of_whole, self.names))


class ModelState:
    """Tensors of a model by key. The key of a tied weight is the first of its names."""

    def __init__(
        self,
        tensors: dict[str, StateTensor],
        order: tuple[str, ...],
        module_versions: dict[str, int],
    ) -> None:
        self.tensors = tensors
        self.order = order
        """Names in the model's ``state_dict``, in order."""
        self.module_versions = module_versions
        """Version of each module by path; some modules need it to load a state_dict."""
        self._keys = {name: key for key, entry in tensors.items() for name in entry.names}

    def key_of(self, name: str, kind: str, program: ExportedProgram, mode: Mode) -> str:
        """Return the key of the tensor that a program calls ``name``; register new constants."""
        if name in self._keys:
            return self._keys[name]
        if kind not in ("CONSTANT_TENSOR", "BUFFER"):
            raise SplitError(f"the model uses {name}, a {kind.lower()}, which stages cannot hold")
        constant = program.constants[_constant_name(program, name)]
        if not isinstance(constant, torch.Tensor):
            raise SplitError(f"the model uses {name}, a {type(constant).__name__} and not a tensor")
        key = f"constants.{mode}.{name.replace('.', '_')}"
        self.tensors[key] = StateTensor(constant.detach(), "constant", False, (key,))
        return key

    def positions(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the position of each name in the ``state_dict``; -1 if it is not in it."""
        index = {name: position for position, name in enumerate(self.order)}
        return tuple(index.get(name, -1) for name in names)


def _constant_name(program: ExportedProgram, name: str) -> str:
    return name if name in program.constants else f"model.{name}"


def read_state(model: nn.Module) -> ModelState:
    """Return all parameters and buffers of a model; tied ones appear once."""
    state_dict = model.state_dict(keep_vars=True)
    odd = [name for name, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise SplitError(f"the model's state_dict holds {odd[0]}, which is not a tensor")
    named: dict[int, tuple[torch.Tensor, Kind, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), (parameter, "parameter", []))[2].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        named.setdefault(id(buffer), (buffer, "buffer", []))[2].append(name)
    _refuse_shared_storage([entry[0] for entry in named.values() if entry[1] == "parameter"])
    tensors = {
        names[0]: StateTensor(tensor, kind, any(n in state_dict for n in names), tuple(names))
        for tensor, kind, names in named.values()
    }
    known = {name for entry in tensors.values() for name in entry.names}
    unknown = [name for name in state_dict if name not in known]
    if unknown:
        raise SplitError(
            f"the model's state_dict names {unknown[0]}, but no parameter or buffer has this name: a "
            "state_dict hook renames it; remove the hook before splitting"
        )
    return ModelState(tensors, tuple(state_dict), _module_versions(state_dict))


def _module_versions(state_dict: Mapping[str, Any]) -> dict[str, int]:
    """Return the module versions in the metadata, without those that are not small integers."""
    metadata: Mapping[str, Mapping[str, Any]] = getattr(state_dict, "_metadata", {})
    versions = {path: entry.get("version") for path, entry in metadata.items()}
    return {
        path: version
        for path, version in versions.items()
        if type(version) is int and 0 <= version <= MAX_MODULE_VERSION
    }


def _refuse_shared_storage(parameters: list[torch.Tensor]) -> None:
    """Raise ``SplitError`` if two parameters share memory without being one (tied) object."""
    owners: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        pointer = parameter.data_ptr()
        if pointer and parameter.numel() and owners.setdefault(pointer, parameter) is not parameter:
            raise SplitError(
                f"two parameters of shapes {tuple(owners[pointer].shape)} and {tuple(parameter.shape)} "
                "share memory but are different objects; tie them by using one nn.Parameter twice"
            )
