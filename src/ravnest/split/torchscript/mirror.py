"""Mirror the tree of a ``ScriptModule`` in ordinary modules that hold the same tensors."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ravnest.errors import CaptureError


class ScriptMirror(nn.Module):
    """A module with the tensors and the children of a ``ScriptModule``, under the same names.

    Its own attributes are private, because any public name may belong to the user's module.
    """

    _script_value: ModuleValue
    """The value that forward runs on; set for the outermost module only."""

    def __init__(self, original_name: str) -> None:
        super().__init__()
        self._original_name = original_name

    def _get_name(self) -> str:
        return self._original_name


@dataclass(eq=False)
class ModuleValue:
    """A module as a value of the graph, such as ``self`` and ``self.layer``."""

    mirror: ScriptMirror
    children: dict[str, ModuleValue]
    script: Any
    """The C++ module, which has the graphs of the methods."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Other attributes; parameters and buffers inside them are stored as references."""
    assigned: dict[str, Tensor] = field(default_factory=dict)
    """Buffers that this run of forward has assigned (``self.mean = ...``) but not yet written."""
    lent: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Lists and dicts that this run has read: name, container, and a copy to compare with."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleValue:
        mirror = copy.deepcopy(self.mirror, memo)
        children = copy.deepcopy(self.children, memo)
        return ModuleValue(mirror, children, self.script, copy.deepcopy(self.attributes, memo))

    def read(self, name: str) -> Any:
        """Return the value of ``self.name``."""
        if name in self.children:
            return self.children[name]
        if name in self.attributes:
            value = tree_map(_dereferenced, self.attributes[name])
            if isinstance(value, list | dict):
                self.lent.append((name, value, copy.copy(value)))
            return value
        return self.assigned[name] if name in self.assigned else getattr(self.mirror, name)

    def assign(self, name: str, value: Any) -> bool:
        """Assign a buffer and return True; return False if no such buffer has this shape and dtype."""
        buffer = self.mirror._buffers.get(name)
        if buffer is None or not isinstance(value, Tensor):
            return False
        if value.shape != buffer.shape or value.dtype != buffer.dtype:
            return False
        self.assigned[name] = value
        return True

    def finish_run(self) -> None:
        """Write the buffers that a run of forward has assigned, and check that no list changed.

        ``torch.export`` records assignments in the outermost module, but loses them in the others.
        """
        modules = list(self._tree())
        for module in modules:
            module._check_lent()
        pairs = [pair for module in modules for pair in module._assignments()]
        # One buffer may have been assigned to another: read all values before writing any.
        several = len(pairs) > 1
        values = [value.detach().clone() if several else value.detach() for _, value in pairs]
        for (buffer, _), value in zip(pairs, values, strict=True):
            buffer.copy_(value)

    def forget_run(self) -> None:
        """Reset the state of this run of forward, whether it succeeded or not."""
        for module in self._tree():
            module.assigned.clear()
            module.lent.clear()

    def _tree(self) -> Iterator[ModuleValue]:
        yield self
        for child in self.children.values():
            yield from child._tree()

    def _assignments(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, value in self.assigned.items():
            yield getattr(self.mirror, name), value

    def _check_lent(self) -> None:
        for name, value, before in self.lent:
            if not _is_same(value, before):
                raise CaptureError(
                    f"forward changes the {type(value).__name__} self.{name} of "
                    f"{self.mirror._get_name()} in place, which a captured graph would lose: use "
                    "a buffer (register_buffer), or return the values"
                )

    def item(self, key: int | str) -> ModuleValue:
        """Return a module of a ModuleList or a ModuleDict."""
        return self.children[key] if isinstance(key, str) else [*self.children.values()][key]

    def graph(self, method: str) -> Any:
        """Return the graph of a method, with the methods that it calls inlined."""
        return self.script._get_method(method).inlined_graph


def _is_same(value: Any, before: Any) -> bool:
    """Return True if a list or dict holds the same objects as before."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    others = list(before) if isinstance(before, dict) else range(len(before))
    return list(keys) == list(others) and all(value[key] is before[key] for key in keys)


@dataclass(frozen=True)
class _Reference:
    """A tensor by owner and name: export replaces the tensors of modules while it traces."""

    owner: nn.Module
    name: str


def _dereferenced(value: Any) -> Any:
    return getattr(value.owner, value.name) if isinstance(value, _Reference) else value


def mirror_of(module: torch.jit.ScriptModule) -> ModuleValue:
    """Mirror ``module`` without copying tensors; tied weights stay tied."""
    builder = _Builder()
    value = builder.mirrored(module)
    builder.read_attributes(value)
    return value


class _Builder:
    """Builds mirrors. Identifies tensors by memory: a loaded module does not tie weights by identity."""

    def __init__(self) -> None:
        self._parameters: dict[Hashable, nn.Parameter] = {}
        self._places: dict[Hashable, _Reference] = {}

    def mirrored(self, module: Any) -> ModuleValue:
        mirror = ScriptMirror(str(module.original_name))
        mirror.training = getattr(module, "training", True)
        for name, tensor in module._parameters.items():
            parameter = self._parameters.setdefault(_memory(tensor), _parameter(tensor))
            mirror.register_parameter(name, parameter)
            self._places.setdefault(_memory(tensor), _Reference(mirror, name))
        for name, tensor in module._buffers.items():
            mirror.register_buffer(name, tensor)
            self._places.setdefault(_memory(tensor), _Reference(mirror, name))
        children = {}
        for name, child in module._modules.items():
            children[name] = self.mirrored(child)
            mirror.add_module(name, children[name].mirror)
        return ModuleValue(mirror, children, module._c)

    def read_attributes(self, value: ModuleValue) -> None:
        """Read the other attributes; ``nn.LSTM``, for example, has a list of its weights."""
        mirror = value.mirror
        known = {"training", *mirror._parameters, *mirror._buffers}
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(value.script._type())
        for name in kind.get_attributes().keys() - known:
            attribute = tree_map(self._referenced, value.script.getattr(name))
            if isinstance(attribute, Tensor):  # export looks for constants there
                setattr(mirror, name, attribute)
            else:
                value.attributes[name] = attribute
        for child in value.children.values():
            self.read_attributes(child)

    def _referenced(self, leaf: Any) -> Any:
        return self._places.get(_memory(leaf), leaf) if isinstance(leaf, Tensor) else leaf


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Return the parameter itself, or one that shares its memory if the module was loaded."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), tensor.requires_grad)


def _memory(tensor: Tensor) -> Hashable:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
