"""The further settings that ``Node(**kwargs)`` takes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ravnest.averaging.coordinator import Mode
from ravnest.errors import SettingsError
from ravnest.runtime.schedule.machine import Schedule
from ravnest.telemetry import RecordSink
from ravnest.transport.base import Transport
from ravnest.wire.codecs import CODECS, FP16, RAW


@dataclass(frozen=True)
class NodeSettings:
    """Each field is a keyword of ``Node``."""

    schedule: Schedule = "async"
    """``async``: no bubbles, gradients may be a few updates old. ``sync``: flush at each update, the
    result of a single process."""
    in_flight: int | None = None
    """Micro-batches under way in the pipeline; None lets Ravnest choose and adapt."""
    recompute: bool = False
    """Keep only the inputs of a stage and compute its activations again for the backward."""
    clip_grad_norm: float | None = None
    """Clip gradients to this norm: over the whole model in ``sync``, per stage in ``async``."""
    look_ahead: bool = False
    """In ``async``, run forwards on the weights that are expected when the gradient comes back; takes
    memory for one more copy of them. Helps where gradients are many updates old."""
    averaging: Mode = "background"
    """Between clusters. ``background``: training goes on meanwhile. ``blocking``: all stand still."""
    listen: str | None = None
    """``host:port`` to listen at, where it differs from the address in ``node_configs.json``."""
    connect_timeout: float = 300.0
    """Seconds to wait for the neighbours at the start."""
    stall_timeout: float = 900.0
    """Seconds without any progress after which the Root ends the run."""
    seed: int | None = None
    """Of dropout and the like; None takes that of the plan."""
    folder: str | Path = "node_data"
    """Where ``clusterize`` wrote its files."""
    trained_folder: str | Path = "trained"
    """Where trained stages are written."""
    progress: bool = True
    """Show a progress line; validation figures and what the node waits for are always printed."""
    transport: Transport | None = None
    """Another way to reach the neighbours than gRPC."""
    record_sink: RecordSink | None = None
    """Receiver of telemetry records; the provider's worker process passes one."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> NodeSettings:
        """Settings from keywords; an unknown one is refused with the nearest that exists."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, [*known, *_NAMED], n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise SettingsError(f"Node does not know {name!r}: {hint}")
        settings = cls(**given)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.schedule not in ("async", "sync"):
            raise SettingsError(f"schedule must be 'async' or 'sync', not {self.schedule!r}")
        if self.averaging not in ("background", "blocking"):
            raise SettingsError(f"averaging must be 'background' or 'blocking', not {self.averaging!r}")
        if self.in_flight is not None and not is_count(self.in_flight):
            raise SettingsError(f"in_flight must be a whole number from 1, not {self.in_flight!r}")
        for name in ("connect_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be a positive number of seconds")


def codec_for(compression: object) -> str:
    """The codec that ``Node(compression=...)`` asks for."""
    if isinstance(compression, bool):
        return FP16.name if compression else RAW.name
    if isinstance(compression, str) and compression in CODECS and compression != RAW.name:
        return compression
    choices = ", ".join(repr(name) for name in CODECS if name != RAW.name)
    raise SettingsError(
        f"compression must be False, True (which is 'fp16') or one of {choices}, not {compression!r}"
    )


_NAMED = (
    "name",
    "model",
    "optimizer",
    "optimizer_params",
    "lr_scheduler",
    "lr_scheduler_params",
    "lr_step_on_epoch_change",
    "criterion",
    "update_frequency",
    "reduce_factor",
    "labels",
    "test_labels",
    "device",
    "loss_filename",
    "compression",
    "average_optim",
)


def is_count(value: object) -> bool:
    """Whether a value counts something: a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
