"""``Job``, the requester's description of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ravnest.errors import JobError
from ravnest.jobs.hugging_face import fields_of, with_own_fields
from ravnest.keywords import refuses_unknown_keywords
from ravnest.types import RobustMean


@refuses_unknown_keywords(JobError)
@dataclass(frozen=True, eq=False)
class Job:
    """Description of a training run to submit."""

    model: nn.Module
    """Model to train. Its current weights are the initial weights; the object itself is not changed."""
    example_args: Sequence[Any] | torch.Tensor = ()
    """Positional inputs of the model's `forward`: tensors of a batch, or of a single sample with a
    batch dimension of 1, or constants. Not needed if `example_kwargs` has all inputs."""
    train_data: Any = None
    """Needed to train. Training samples: a dataset with a length and an index, a tuple of tensors or a
    `DataLoader`. See [Data](#data)."""
    criterion: Any = None
    """Needed. Loss: a module or function of `torch.nn`, or a function of the model's output and the
    labels. See [Losses](#losses)."""
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    """Class of `torch.optim` whose step needs no closure."""
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer: numbers, strings, booleans, None, or lists of them."""
    optimizer_state: Literal["float32", "int8"] = "float32"
    """`"int8"`: providers keep the larger tensors of the optimizer's state in 8 bits per value. See
    [Optimizer state in 8 bits](#optimizer-state-in-8-bits)."""
    parameter_groups: Sequence[Mapping[str, Any]] = ()
    """Other settings of the optimizer for parameters whose names match, such as
    `[{"match": "*.bias", "weight_decay": 0}]`. See [Parameter groups](#parameter-groups)."""
    lr_scheduler: type[Any] | str | Sequence[Mapping[str, Any]] | None = None
    """Class of `torch.optim.lr_scheduler` that takes neither functions nor other schedulers, or a name
    such as `"cosine"`, or a list of pieces. See [Learning rates](#learning-rates)."""
    lr_scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the scheduler, of the same types as `optimizer_params`."""
    lr_step_on_epoch_change: bool = True
    """Step a scheduler of torch at the end of each epoch; `False`: after each update. Names and pieces
    always count updates."""
    epochs: int = 1
    """Number of passes over the training data. 0: only evaluate the model, see
    [Evaluation](#evaluation)."""
    batch_size: int | None = None
    """Samples per batch; `update_frequency` batches make an update. Memory is planned for it. `None`:
    the batch size of the `DataLoader`, or of the example, or 64 if the example is a single sample."""
    val_data: Any = None
    """Validation samples, in the same forms as `train_data`; `None`: no validation."""
    val_freq: int = 1
    """Epochs between validations."""
    augment: Callable[..., Any] | None = None
    """Function of the inputs of a training batch, in the order of `forward`, that returns them changed;
    captured and drawn anew for each batch of each epoch. See [Augmentation](#augmentation)."""
    early_stopping: Mapping[str, Any] | None = None
    """Stop before the last epoch, after `patience` (3) validations without a better value of a metric:
    `{"metric": "loss", "patience": 3, "min_delta": 0.0}`. See [The best model](#the-best-model)."""
    keep_best: str | Mapping[str, Any] | None = None
    """Metric by which the weights of the best validation are kept, for `handle.best()`."""
    metrics: Sequence[Any] | Mapping[str, Any] = ()
    """Metrics of validations: names such as `"accuracy"`, mappings with a name and parameters, or
    functions of the model's output and the labels. Empty: the accuracy if it is defined, else the loss.
    See [Metrics](#metrics)."""
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword inputs of the model's `forward`: tensors as in `example_args`, or constants."""
    update_frequency: int = 1
    """Batches per update; the gradient is their mean."""
    schedule: Literal["auto", "sync", "async"] = "auto"
    """`sync`: the updates of a single process. `async`: gradients may be one update old. `auto`: the
    one that reaches a given loss sooner by prediction: `sync` if batches can be split into enough
    micro-batches, else `async`. See [Schedules](schedules.md)."""
    micro_batches: int | Literal["auto"] = "auto"
    """Number of micro-batches that each batch is split into. `auto`: chosen by predicted and then
    by measured times, and 1 if the result would not be that of the whole batch."""
    precision: Literal["bf16"] | None = None
    """`"bf16"`: mixed precision as under `torch.autocast`: weights stay float32, matrix products compute
    in bfloat16. `None`: the types of the model. See [Mixed precision](#mixed-precision)."""
    compression: bool | str = False
    """Encoding of activations, gradients and averages between providers: `False` (none), `True` or
    `"fp16"`, `"bf16"`, `"int8"`. See [Compression](compression.md)."""
    reduce_factor: int | None = None
    """Updates between averaging rounds of the clusters; `None`: once per epoch, but at most every 2 s.
    See [Averaging](averaging.md)."""
    average_optim: bool = False
    """Average the optimizer's state as well."""
    robust_mean: RobustMean | None = None
    """Average of three or more clusters that a cluster with wrong parameters cannot spoil. `"trimmed"`:
    of each value, the largest and the smallest are left out. Needs `clusters`. See
    [Averaging](averaging.md#robust-mean)."""
    clip_grad_norm: float | None = None
    """Maximum norm of the gradients of the whole model."""
    clip_grad_value: float | None = None
    """Maximum absolute value of an element of the gradients; not together with `clip_grad_norm`."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as `0.999`: the average is validated
    and is the result. See [Average of the weights](#average-of-the-weights)."""
    stop_on_nan: int | None = 1
    """Number of updates in a row with a loss that is NaN or infinite at which the job fails; the last
    checkpoint before is kept. `None`: training goes on. See [Diverged jobs](#diverged-jobs)."""
    look_ahead: bool = True
    """In `async`, run forward passes on weights that the optimizer's state predicts for the update of
    their gradient. See [Schedules](schedules.md)."""
    recompute: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass instead of storing them, which saves memory and takes
    time. `"auto"`: each provider as much as its memory makes necessary."""
    shuffle: bool = True
    """Shuffle the samples before the clusters share them, and again in each epoch."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller than `batch_size`."""
    seed: int = 42
    """Seed of the sample order, of dropout and of other random operations."""
    check_values: bool = True
    """Refuse data with values that are NaN or infinite, before upload. `False`: the model is made for
    them."""
    name: str = ""
    """Name that is shown to people; empty: the class name of the model."""
    clusters: int | None = None
    """Number of clusters; `None`: the planner chooses."""
    min_providers: int = 1
    """Number of idle providers that the job waits for before it is planned."""
    max_providers: int | None = None
    """Maximum number of providers that the job uses; `None`: all idle providers."""
    on_insufficient: Literal["wait", "fail"] | float = "wait"
    """Reaction if the providers are too few or cannot hold the model, also after a loss during training:
    `wait` for more, `fail`, or wait for this number of seconds."""
    resume_from: str | None = None
    """Ended job of yours whose newest checkpoint training starts from, such as `"job-1234abcd"`."""

    @classmethod
    def from_training_arguments(
        cls,
        args: Any,
        *,
        train_dataset: Any,
        eval_dataset: Any = None,
        data_collator: Any = None,
        **fields: Any,
    ) -> Job:
        """Return a job from what a ``transformers.Trainer`` takes; ``fields`` are further fields.

        ``args`` are ``transformers.TrainingArguments``. Weight decay leaves out biases and norms, as in
        the ``Trainer``. Raises ``JobError`` for arguments that a job cannot follow.
        """
        found = fields_of(args, train_dataset, eval_dataset, data_collator)
        return cls(**with_own_fields(found, fields))
