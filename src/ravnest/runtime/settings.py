"""Further settings of ``Node``, passed as keywords."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ravnest.averaging.coordinator import Mode
from ravnest.deadlines import NEIGHBOUR_CONNECT, NODE_RETURN, TRAINING_STALL
from ravnest.errors import SettingsError
from ravnest.keywords import unknown_keyword
from ravnest.logs.record_stream import PROGRESS_VARIABLE
from ravnest.runtime.stage.validation_metrics import (
    METRIC_NAMES,
    ChosenMetric,
    choose_metrics,
    with_needed,
)
from ravnest.telemetry import RecordSink
from ravnest.tracing.recorder import SpanSink
from ravnest.transport.base import Transport
from ravnest.types import ROBUST_CLUSTERS, RobustMean, ScheduleSetting, StateForm
from ravnest.wire.codecs import CODECS, FP16, RAW

RESUME_VARIABLE = "RAVNEST_RESUME"
TRACE_VARIABLE = "RAVNEST_TRACE"


@dataclass(frozen=True)
class NodeSettings:
    """Settings of a node; each field is a keyword of ``Node``."""

    schedule: ScheduleSetting = "auto"
    """``sync``: the updates of a single process. ``async``: gradients may be one update old. ``auto``:
    the schedule that the plan has chosen."""
    micro_batches: int | Literal["auto"] = "auto"
    """Number of micro-batches into which each batch is split. ``auto``: chosen by predicted and then by
    measured times if the result is that of the whole batch, else 1."""
    in_flight: int | None = None
    """Number of micro-batches in flight in the pipeline; None: as many as are useful and fit in the
    planned memory."""
    recompute: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass. ``True``: all, so that only the inputs of the stage
    are kept. ``False``: none. ``auto``: as many as the plan says, so that the node's memory suffices."""
    clip_grad_norm: float | None = None
    """Clip gradients to this norm, over the whole model."""
    clip_grad_value: float | None = None
    """Clip each element of the gradients to this value; not together with ``clip_grad_norm``."""
    plateau_metric: str = ""
    """Metric that the learning rate scheduler ``ReduceLROnPlateau`` gets after each validation; empty:
    the first one. It is added to ``metrics`` if it is missing there."""
    stop_on_nan: int | None = 1
    """Number of updates in a row with a loss that is NaN or infinite at which training stops with an
    error, before the last of them is made. Weights that are not finite stop it at the next checkpoint.
    None: training goes on."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999, which is validated and saved
    instead of the weights; see docs/trainer.md. None: no average."""
    optimizer_state: StateForm = "float32"
    """``int8``: keep larger tensors of the optimizer's state in 8 bits per value between updates. Not
    together with ``average_optim``. See docs/submitting.md."""
    metrics: Sequence[Any] | Mapping[str, Any] = ()
    """Metrics of validations, computed at the Leaf: names such as ``"accuracy"``, mappings with a name
    and parameters, or functions of the model's output and the labels. Empty: the accuracy if it is
    defined, else the loss. See docs/trainer.md."""
    look_ahead: bool = True
    """In ``async``, run forwards on the weights that the optimizer's state predicts for the update of
    their gradient."""
    averaging: Mode = "background"
    """Averaging between clusters. ``background``: training continues. ``blocking``: training pauses."""
    robust_mean: RobustMean | None = None
    """Mean of three or more clusters that single ones cannot spoil. ``"trimmed"``: of each value, the
    largest and the smallest are left out. It sends more bytes. None: the mean, weighted by samples."""
    scheduler_steps: float = 1.0
    """Steps of a learning rate scheduler per update, with ``lr_step_on_epoch_change=False``. If clusters
    share the data, each makes fewer updates than one process would: the ratio makes the schedule end
    where it would end in one process."""
    listen: str | None = None
    """``host:port`` to listen at, if it differs from the address in ``node_configs.json``."""
    connect_timeout: float = NEIGHBOUR_CONNECT
    """Seconds to wait for the neighbours at the start."""
    outage: float | None = None
    """Seconds for which the connection to another node may be down: nodes connect again and lose
    nothing. None: what the plan says, 60 s."""
    checkpoints: bool = True
    """Write checkpoints, so that training can continue after the loss of a node."""
    checkpoint_updates: int | None = None
    """Updates between two checkpoints; None: only the time and the ends of epochs count."""
    checkpoint_minutes: float = 1.0
    """Minutes between two checkpoints at most. One is also taken after each epoch, unless the last one
    is too recent for its cost."""
    checkpoint_folder: str | Path = "checkpoints"
    """Folder of checkpoints and of replicas of the neighbours' checkpoints."""
    resume: bool = field(default_factory=lambda: os.environ.get(RESUME_VARIABLE) == "1")
    """Continue the newest run of which all nodes have a checkpoint. The default is False, unless the
    environment variable ``RAVNEST_RESUME`` is 1, as ``ravnest launch --restart`` sets it."""
    rejoin_timeout: float = NODE_RETURN
    """Seconds to wait for a lost node, or the one that takes its place; 0: the run ends."""
    hands_over: bool = False
    """If this process ends for a reason of its machine, the others wait for one that takes its place.
    Set by the provider's worker process; a script that is interrupted ends the run on all nodes."""
    spot_checks: float = 0.0
    """Mean seconds between two outputs of the previous node that are checked; 0: none. Set by the
    provider's worker process: the server computes such outputs again."""
    stall_timeout: float = TRAINING_STALL
    """Seconds without progress after which the Root ends the run."""
    seed: int | None = None
    """Seed of dropout and similar operations; None: the seed of the plan."""
    folder: str | Path = "node_data"
    """Folder in which ``clusterize`` wrote its files."""
    trained_folder: str | Path = "trained"
    """Folder for trained stages."""
    save_frozen: bool = True
    """Save trained stages with their frozen weights, so that ``model_fusion`` needs nothing else. The
    provider's worker process leaves them out: the server has them."""
    progress: bool = field(default_factory=lambda: os.environ.get(PROGRESS_VARIABLE) != "0")
    """Show a progress line; validation results and waiting messages are always printed. The default is
    True, unless ``ravnest launch`` shows the progress of all nodes."""
    transport: Transport | Callable[[], Transport] | None = None
    """Transport to use instead of TCP connections, or a function that makes one each time the node
    connects."""
    record_sink: RecordSink | None = None
    """Receiver of the node's records: a ``RunLog``, ``Callbacks``, ``NodeMetrics`` or another object
    with ``emit``. Losses and validation results are those of the Root."""
    trace: str | Path | SpanSink | None = field(
        default_factory=lambda: os.environ.get(TRACE_VARIABLE) or None
    )
    """Folder for what the node does when, for ``ravnest trace``; or another receiver of spans. None:
    nothing is recorded. The default is the environment variable ``RAVNEST_TRACE``, as ``ravnest launch
    --trace`` sets it."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> NodeSettings:
        """Return settings from keywords; the error for an unknown one names the closest known one."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise SettingsError(unknown_keyword("Node", name, [*known, *_NAMED]))
        settings = cls(**given)
        settings._check()
        return settings

    @property
    def chosen_metrics(self) -> tuple[ChosenMetric, ...]:
        """Metrics of validations."""
        return with_needed(choose_metrics(self.metrics), [self.plateau_metric])

    def _check(self) -> None:
        labels = [metric.label for metric in self.chosen_metrics]
        if self.plateau_metric and self.plateau_metric not in labels:
            known = ", ".join(dict.fromkeys((*labels, *METRIC_NAMES)))
            raise SettingsError(
                f"plateau_metric names {self.plateau_metric!r}, which is not one of {known}"
            )
        if self.schedule not in ("auto", "async", "sync"):
            raise SettingsError(f"schedule must be 'auto', 'sync' or 'async', not {self.schedule!r}")
        if self.micro_batches != "auto" and not is_count(self.micro_batches):
            raise SettingsError(
                f"micro_batches must be 'auto' or a whole number from 1, not {self.micro_batches!r}"
            )
        if self.recompute not in (True, False, "auto"):
            raise SettingsError(f"recompute must be True, False or 'auto', not {self.recompute!r}")
        check_state_form(self.optimizer_state)
        if self.averaging not in ("background", "blocking"):
            raise SettingsError(f"averaging must be 'background' or 'blocking', not {self.averaging!r}")
        if self.robust_mean not in (None, "trimmed"):
            raise SettingsError(f"robust_mean must be None or 'trimmed', not {self.robust_mean!r}")
        self._check_numbers()

    def check_clusters(self, clusters: int) -> None:
        """Raise ``SettingsError`` if the settings do not fit a plan with so many clusters."""
        if self.robust_mean is not None and clusters < ROBUST_CLUSTERS:
            raise SettingsError(
                f"robust_mean={self.robust_mean!r} needs {ROBUST_CLUSTERS} clusters or more, and the "
                f"plan has {clusters}: of two, nobody can tell which one is wrong. Plan more, or leave "
                "robust_mean out"
            )

    def _check_numbers(self) -> None:
        for name in ("in_flight", "checkpoint_updates", "stop_on_nan"):
            if (count := getattr(self, name)) is not None and not is_count(count):
                raise SettingsError(f"{name} must be a whole number from 1, not {count!r}")
        check_ema(self.ema)
        if not self.scheduler_steps > 0:
            raise SettingsError(f"scheduler_steps must be positive, not {self.scheduler_steps!r}")
        for name in ("outage", "rejoin_timeout", "spot_checks"):
            if (seconds := getattr(self, name)) is not None and not seconds >= 0:
                raise SettingsError(f"{name} must be a number of seconds from 0, not {seconds!r}")
        for name in ("connect_timeout", "stall_timeout", "checkpoint_minutes"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be a positive number")


def codec_for(compression: object) -> str:
    """Return the codec for the argument ``compression`` of ``Node``."""
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


def check_ema(decay: object) -> None:
    """Raise ``SettingsError`` unless a value is the decay of a moving average of weights, or None."""
    given = isinstance(decay, int | float) and not isinstance(decay, bool) and 0 <= decay < 1
    if decay is not None and not given:
        raise SettingsError(
            f"ema must be the decay of a moving average, a number from 0 and below 1 such as 0.999, not "
            f"{decay!r}"
        )


def check_state_form(form: object, *, average_optim: bool = False) -> None:
    """Raise ``SettingsError`` unless a value is a form of optimizer state that can be used."""
    if form not in ("float32", "int8"):
        raise SettingsError(f"optimizer_state must be 'float32' or 'int8', not {form!r}")
    if form == "int8" and average_optim:
        raise SettingsError(
            "average_optim=True needs the optimizer's state in float32, on all clusters at once, and "
            "optimizer_state='int8' does not have the memory for it: leave out one of them"
        )


def is_count(value: object) -> bool:
    """Return whether ``value`` is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
