"""Configuration of a node: its spec in the plan, and what follows from the user's settings."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravnest.errors import SettingsError
from ravnest.plan.schedule_choice import DELAY_COST
from ravnest.runtime.batch_parts import BatchSplit, part_sizes
from ravnest.runtime.control.checkpoint_policy import CheckpointPolicy
from ravnest.runtime.data import Criterion
from ravnest.runtime.schedule.machine import MAX_DELAY
from ravnest.runtime.settings import NodeSettings
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.store.node_spec import NodeSpec
from ravnest.tracing.recorder import SpanRecorder
from ravnest.types import Address, Schedule
from ravnest.wire.messages import PROTOCOL, Hello, LossSplit

logger = logging.getLogger(__name__)

DELAY_WARNING = (
    "the schedule is async, so that gradients may be one update late: training needs up to about "
    f"{DELAY_COST:g} times the samples for the same loss. "
    'schedule="sync" avoids this; each update then takes longer'
)


@dataclass(frozen=True)
class RuntimeConfig:
    """Configuration of a node: its spec in the plan and the user's settings."""

    spec: NodeSpec
    rule: UpdateRule
    settings: NodeSettings
    update_frequency: int
    criterion: Criterion | None
    labels: Any
    test_labels: Any
    loss_filename: str | Path
    reduce_factor: int | None = None
    average_optim: bool = False
    codec: str = "raw"
    trace: SpanRecorder | None = None
    """Receiver of what the node does when."""

    @property
    def seed(self) -> int:
        """Seed of dropout and similar operations."""
        return self.spec.seed if self.settings.seed is None else self.settings.seed

    @property
    def listen(self) -> Address:
        """Address to listen at."""
        text = self.settings.listen or self.spec.address
        try:
            return Address.parse(text)
        except ValueError as error:
            raise SettingsError(f"listen {error}") from error

    @property
    def schedule(self) -> Schedule:
        """Schedule of the run: the user's, or the plan's for ``auto``."""
        return self.spec.schedule if self.settings.schedule == "auto" else self.settings.schedule

    @property
    def window(self) -> int:
        """Micro-batches in flight: the user's number, or as many as fit in the planned memory.

        With the user's number of micro-batches they have another size than planned.
        """
        spec, wanted = self.spec, self.settings.micro_batches
        if self.settings.in_flight is not None:
            return self.settings.in_flight
        planned = spec.in_flight if wanted == "auto" else spec.in_flight * wanted // spec.microbatches
        return max(planned, 1 + MAX_DELAY[self.schedule])

    @property
    def delayed_window(self) -> int:
        """Batches in flight if gradients may be late contrary to the plan, in whose memory two fit."""
        return self.settings.in_flight or 1 + MAX_DELAY["async"]

    @property
    def kept(self) -> int | None:
        """Most micro-batches whose activations are kept at once: the user's choice, or the plan's."""
        spec, recompute = self.spec, self.settings.recompute
        if recompute is True:
            return 0
        if recompute is False or spec.kept is None:
            return None
        wanted = self.settings.micro_batches
        return spec.kept if wanted == "auto" else max(1, spec.kept * wanted // spec.microbatches)

    def batch_split(self, loss: LossSplit) -> BatchSplit:
        """Return the rule by which batches are split, given the Leaf's answer about the loss."""
        spec, wanted = self.spec, self.settings.micro_batches
        smallest = max(spec.smallest_rows, loss.smallest)
        if wanted != "auto":
            if wanted > 1 and not loss.allowed:
                raise SettingsError(f"micro_batches={wanted} is not possible: {loss.reason}")
            if wanted > 1 and not spec.splittable:
                logger.warning("micro_batches=%d changes the result: %s", wanted, spec.split_reason)
            return BatchSplit(count=wanted, smallest=smallest, reason=f"micro_batches={wanted} is set")
        if spec.microbatch_rows is None:
            return BatchSplit(reason=spec.split_reason)
        if not loss.allowed:
            late = self.settings.schedule == "auto" and spec.schedule == "sync" and spec.delay_fits
            # With one batch at a time, a delay would gain nothing.
            late = late and self.delayed_window > 1
            return BatchSplit(reason=f"batches are not split: {loss.reason}", late=late)
        return BatchSplit(spec.microbatch_rows, smallest=smallest, reason=spec.split_reason)

    def planned_parts(self, split: BatchSplit) -> int:
        """Return the number of micro-batches of a batch of the planned size."""
        return self.spec.microbatches if split.rows is not None else split.count or 1

    def memory_warning(self, split: BatchSplit) -> str:
        """Return a warning if micro-batches are larger than the memory of the nodes is planned for."""
        batch, largest = self.spec.batch_size, self.spec.largest_rows
        if batch is None or largest is None:
            return ""
        rows, parts = max(part_sizes(batch, split.parts(batch))), -(-batch // largest)
        if rows <= largest:
            return ""
        return (
            f"micro-batches of {rows} samples may need more memory than the nodes offer, which was "
            f"planned for at most {largest} samples at a time: set micro_batches to {parts} or more, "
            "or plan with more RAM or a smaller batch"
        )

    @property
    def may_split(self) -> bool:
        """True if batches are split unless the loss forbids it."""
        wanted = self.settings.micro_batches
        return self.spec.microbatch_rows is not None if wanted == "auto" else wanted > 1

    @property
    def may_round_otherwise(self) -> bool:
        """True if results may differ from those of one process by float error.

        A number of micro-batches that the user sets promises equal bits.
        """
        return self.schedule == "sync" and self.settings.micro_batches == "auto" and self.may_split

    @property
    def tunes_split(self) -> bool:
        """True if the Root may change the number of micro-batches: whole batches fit the memory."""
        spec, settings = self.spec, self.settings
        return (
            self.may_split
            and self.schedule == "sync"
            and settings.micro_batches == "auto"
            and settings.in_flight is None
            and self.update_frequency == 1
            and spec.stages > 1
            and spec.in_flight >= spec.microbatches
        )

    @property
    def checkpoint_policy(self) -> CheckpointPolicy | None:
        """Rule for checkpoints, at the Root; None elsewhere, and if none are taken."""
        settings = self.settings
        if self.spec.stage > 0 or not settings.checkpoints:
            return None
        return CheckpointPolicy(
            settings.checkpoint_updates, settings.checkpoint_minutes * 60, 0, time.monotonic()
        )

    def hello(self) -> Hello:
        """Return the introduction of a new start, with the settings that its neighbours must share."""
        spec = self.spec
        agreed = {
            "schedule": self.schedule,
            "micro_batches": str(self.settings.micro_batches),
            "update_frequency": str(self.update_frequency),
            "clip_grad_norm": str(self.rule.clip),
            "clip_grad_value": str(self.rule.clip_value),
            "seed": str(self.seed),
            "averaging": self.settings.averaging,
            "robust_mean": str(self.settings.robust_mean),
            "average_optim": str(self.average_optim),
            "ema": str(self.rule.ema),
        }
        return Hello(
            PROTOCOL,
            spec.plan,
            spec.node,
            spec.cluster,
            spec.stage,
            settings=agreed,
            codec=self.codec,
            addresses=(spec.address, *spec.others),
            generation=spec.generation,
            incarnation=secrets.token_hex(8),
        )
