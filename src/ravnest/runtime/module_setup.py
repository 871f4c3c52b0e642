"""Initial weights and device of a stage, as the user gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ravnest.errors import SettingsError
from ravnest.split.module import StageModule


def initialise(module: StageModule, model: nn.Module) -> None:
    """Initialise a stage from a module with the same parameter names."""
    values = dict(model.state_dict())
    for entry in module.spec.state:
        for name, whole in zip(entry.names, entry.model_names, strict=True):
            if entry.rows is not None and whole in values:
                values[name] = values[whole][entry.rows.first : entry.rows.stop]
    wanted = module.state_dict()
    missing = sorted(name for name in wanted if name not in values)
    if missing:
        raise SettingsError(
            f"model has no {missing[0]}, which the stage needs: pass the model that clusterize() split, "
            "or None to use the weights that it had then"
        )
    wrong = [name for name, tensor in wanted.items() if values[name].shape != tensor.shape]
    if wrong:
        name = wrong[0]
        raise SettingsError(
            f"{name} of model has shape {list(values[name].shape)}, but the stage's has "
            f"{list(wanted[name].shape)}"
        )
    module.load_state_dict({name: values[name] for name in wanted})


def device_for(device: Any) -> torch.device:
    """Return the device; the documented default is the class ``torch.device``, which means the CPU."""
    if device is None or device is torch.device:
        return torch.device("cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingsError(f"device must be like 'cpu' or 'cuda:0', not {device!r}: {error}") from error
