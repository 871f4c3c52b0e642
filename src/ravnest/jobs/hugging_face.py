"""Datasets and training arguments of Hugging Face, recognised without an import of its libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ravnest.errors import JobError
from ravnest.runtime.data import LABELS
from ravnest.runtime.stage.parameter_groups import matches

_LABEL_NAMES = ("label", "label_ids")
"""Names of the target in datasets, which the collators of Transformers rename to ``labels``."""
_OPTIMIZERS = {
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
_NOT_DECAYED = ("*bias", "*norm*", "*Norm*", "*.ln_*")
_FLAGS = ("fp16", "group_by_length", "load_best_model_at_end", "torch_compile", "deepspeed")
"""Arguments that change the training, and that a job does not have."""


class TableSamples:
    """Rows of a ``datasets.Dataset`` as samples: no texts, tensors for lists, the target ``labels``."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = self._table[index].items()
        row = {name: _converted(value) for name, value in found if not isinstance(value, str)}
        for name in _LABEL_NAMES:
            if LABELS not in row and name in row:
                row[LABELS] = row.pop(name)
        return row


def samples_of(dataset: Any) -> Any:
    """Return the samples of a ``datasets.Dataset``; other datasets as they are."""
    is_table = all(hasattr(dataset, name) for name in ("column_names", "features", "__len__"))
    return TableSamples(dataset) if is_table else dataset


def _converted(value: Any) -> Any:
    """Return lists of numbers as tensors, and other values as they are."""
    if not isinstance(value, list):
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError):
        return value


def fields_of(args: Any, train_dataset: Any, eval_dataset: Any, data_collator: Any) -> dict[str, Any]:
    """Return the fields of a ``Job`` for ``transformers.TrainingArguments`` and the data of a trainer.

    Raises ``JobError`` for arguments that a job cannot follow.
    """
    _check(args)
    rows = args.per_device_train_batch_size
    accumulated = int(args.gradient_accumulation_steps)
    optimizer, params = _optimizer(args)
    warm_up = {"warmup_ratio": getattr(args, "warmup_ratio", None)}
    if getattr(args, "warmup_steps", 0):
        warm_up = {"warmup_steps": args.warmup_steps}
    found: dict[str, Any] = {
        "train_data": _data(train_dataset, data_collator, rows),
        "val_data": None if eval_dataset is None else _data(eval_dataset, data_collator, rows),
        "batch_size": rows,
        "epochs": int(args.num_train_epochs),
        "optimizer": optimizer,
        "optimizer_params": params,
        "lr_scheduler": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "lr_scheduler_params": {name: value for name, value in warm_up.items() if value}
        | dict(getattr(args, "lr_scheduler_kwargs", None) or {}),
        "update_frequency": accumulated,
        "clip_grad_norm": args.max_grad_norm or None,
        "seed": int(args.seed),
        "drop_last": bool(args.dataloader_drop_last),
        "precision": "bf16" if getattr(args, "bf16", False) else None,
    }
    return found


def _check(args: Any) -> None:
    if getattr(args, "max_steps", -1) > 0:
        raise JobError(
            f"max_steps={args.max_steps}: a job counts epochs; give TrainingArguments num_train_epochs"
        )
    if args.num_train_epochs != int(args.num_train_epochs):
        raise JobError(f"num_train_epochs={args.num_train_epochs} must be a whole number")
    for name in _FLAGS:
        if getattr(args, name, None):
            raise JobError(
                f"{name}={getattr(args, name)!r} of TrainingArguments has no counterpart in a job: "
                "leave it out"
            )


def _optimizer(args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _OPTIMIZERS:
        raise JobError(
            f"optim={name!r} is none of {', '.join(sorted(_OPTIMIZERS))}: give "
            "Job.from_training_arguments(optimizer=...) a class of torch.optim"
        )
    params: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if name.startswith("adamw"):
        params |= {"betas": [args.adam_beta1, args.adam_beta2], "eps": args.adam_epsilon}
    return _OPTIMIZERS[name], params


def _data(dataset: Any, collator: Any, rows: int) -> Any:
    if collator is None or isinstance(dataset, DataLoader):
        return dataset
    return DataLoader(samples_of(dataset), batch_size=rows, collate_fn=collator)


def with_own_fields(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with the user's own ones; an own optimizer has none of the other parameters.

    Weight decay leaves out biases and norms, as that of a trainer does.
    """
    kept = dict(fields)
    if "optimizer" in own:
        del kept["optimizer_params"]
    elif kept["optimizer_params"]["weight_decay"] and own.get("model") is not None:
        names = [name for name, p in own["model"].named_parameters() if p.requires_grad]
        found = [each for each in _NOT_DECAYED if any(matches(name, each) for name in names)]
        if found:
            kept["parameter_groups"] = [{"match": "|".join(found), "weight_decay": 0.0}]
    return kept | dict(own)
