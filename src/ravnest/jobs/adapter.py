"""Adapters of ``peft`` as data: which trained tensors they have, and their configuration.

``peft`` runs on the requester's machine only, when the job is packed. Its file format is then written
from the trained stages without it.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ravnest.errors import JobError, StageFormatError
from ravnest.store.files import convert, has_format, read_json, write_json
from ravnest.store.weights import save_weights

logger = logging.getLogger(__name__)

FORMAT = "ravnest-adapter"
VERSION = 1
ADAPTER_FILE = "adapter.json"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_LIMIT = 64 << 20


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Adapter of a model: the configuration and the tensors that ``peft`` saves."""

    format: str
    version: int
    config: dict[str, Any]
    """Contents of ``adapter_config.json``."""
    names: dict[str, str]
    """Names in the model's ``state_dict``, by the names that ``peft`` gives the tensors in its file."""


def adapter_of(model: nn.Module) -> Adapter | None:
    """Return the adapter that a model of ``peft`` trains; None for other models.

    None also if parameters outside of the adapter are trained: the whole model is the result then.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    own = {tensor.data_ptr(): name for name, tensor in model.state_dict(keep_vars=True).items()}
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    names = {key: own.get(tensor.data_ptr(), "") for key, tensor in saved.items()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    others = sorted(trained - set(names.values()))
    if not trained:
        raise JobError(
            "no parameter of the model is trained: create the adapter with inference_mode=False, or "
            "load it with PeftModel.from_pretrained(..., is_trainable=True)"
        )
    if others or not all(names.values()):
        logger.warning(
            "the model trains %s outside of its adapter: the result is the whole model, not an adapter",
            others[0] if others else "a tensor that peft computes",
        )
        return None
    return Adapter(FORMAT, VERSION, _config(model), names)


def _config(model: Any) -> dict[str, Any]:
    """Return the configuration of the active adapter as ``peft`` writes it."""
    config = model.peft_config[model.active_adapter]
    with tempfile.TemporaryDirectory(prefix="ravnest-adapter-") as folder:
        config.save_pretrained(folder)
        found = read_json(Path(folder) / CONFIG_FILE, _LIMIT)
    assert isinstance(found, dict)
    return found | {"inference_mode": True}


def write_adapter(adapter: Adapter, path: Path) -> None:
    """Write an adapter's description, for the requester who fetches it."""
    write_json(path, msgspec.to_builtins(adapter), compact=True)


def read_adapter(path: Path) -> Adapter:
    """Read a file that ``write_adapter`` wrote; ``StageFormatError`` for any other file."""
    data = read_json(path, _LIMIT)
    if not has_format(data, FORMAT, VERSION):
        raise StageFormatError(f"{path} is not the description of an adapter")
    return convert(data, Adapter, path)


def save_adapter(adapter: Adapter, trained: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Write trained tensors in the files of ``peft``; return the path of the weights.

    ``PeftModel.from_pretrained(base_model, folder)`` loads them.
    """
    if missing := sorted(set(adapter.names.values()) - set(trained)):
        raise StageFormatError(f"the trained stages lack {missing[0]}, which the adapter has")
    write_json(folder / CONFIG_FILE, adapter.config)
    path = folder / WEIGHTS_FILE
    save_weights(path, {key: trained[name] for key, name in adapter.names.items()})
    return path
