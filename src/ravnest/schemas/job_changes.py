"""Changes with which an earlier job is submitted again; its files at the server are used again."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ravnest.keywords import unknown_keyword
from ravnest.schemas.base import Name, Schema
from ravnest.schemas.jobs import Count, Setting, WaitLimit
from ravnest.types import RobustMean

_MODEL = "is part of the captured model"
_FILES = "is part of the files that were uploaded"
CAPTURED = {
    "model": _MODEL,
    "example_args": _MODEL,
    "example_kwargs": _MODEL,
    "batch_size": "is the size for which memory and times of the model were measured",
    "criterion": "is captured with the model",
    "optimizer": "decides how much memory each weight needs, which was measured with the model",
    "parameter_groups": "is checked against the parameters of the model",
    "metrics": "is captured with the model",
    "early_stopping": "belongs to the captured metrics",
    "keep_best": "belongs to the captured metrics",
    "augment": "is captured with the data",
    "train_data": _FILES,
    "val_data": _FILES,
    "shuffle": _FILES,
    "drop_last": "is checked against the captured model",
    "check_values": "is about data before its upload",
}
"""Fields of a ``Job`` that cannot change without another capture or upload, with the reason."""
StartFrom = Literal["original", "checkpoint", "result", "best"]


class JobChanges(Schema):
    """Settings of a job that differ from those of an earlier one, with the names of ``Job``."""

    start_from: StartFrom = "original"
    """Weights at the start: those that were uploaded, those of the newest checkpoint with everything
    else that it has, the trained ones, or the best ones of ``keep_best``."""
    name: Name = ""
    epochs: Annotated[int, Field(ge=0, le=2**31)] = 1
    optimizer_params: Annotated[dict[str, Setting], Field(max_length=100)] = Field(default_factory=dict)
    """Only those that change; the others stay."""
    lr_scheduler: (
        Annotated[str, Field(max_length=100)]
        | Annotated[tuple[dict[str, str | float], ...], Field(max_length=1000)]
        | None
    ) = None
    """Name of torch's class or of a schedule, or pieces; None: a constant learning rate."""
    lr_scheduler_params: Annotated[dict[str, Setting], Field(max_length=100)] = Field(
        default_factory=dict
    )
    lr_step_on_epoch_change: bool = True
    update_frequency: Count = 1
    schedule: Literal["auto", "async", "sync"] = "auto"
    micro_batches: Count | Literal["auto"] = "auto"
    compression: Literal["fp16", "bf16", "int8"] | None = None
    reduce_factor: Count | None = None
    average_optim: bool = False
    robust_mean: RobustMean | None = None
    val_freq: Count = 1
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    clip_grad_value: Annotated[float, Field(gt=0)] | None = None
    stop_on_nan: Count | None = 1
    look_ahead: bool = True
    recompute: bool | Literal["auto"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    clusters: Count | None = None
    min_providers: Count = 1
    max_providers: Count | None = None
    on_insufficient: WaitLimit = "wait"

    @model_validator(mode="before")
    @classmethod
    def _can_change(cls, given: Any) -> Any:
        """Say why a field cannot change; the defaults above stand for "as before"."""
        if isinstance(given, dict):
            for name in given:
                if name in CAPTURED:
                    raise ValueError(
                        f"{name} {CAPTURED[name]}, so that it cannot change without another upload: "
                        "change it in your program and submit the job from there"
                    )
                if name not in cls.model_fields:
                    known = cls.model_fields
                    raise ValueError(unknown_keyword("a resubmission", str(name)[:100], known))
        return given

    @model_serializer(mode="wrap")
    def _only_changes(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what stays as before."""
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}

    @property
    def given(self) -> dict[str, Any]:
        """The settings that change, by name."""
        found = self.model_fields_set - {"start_from"}
        return {name: getattr(self, name) for name in type(self).model_fields if name in found}
