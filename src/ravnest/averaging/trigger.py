"""A Root's own count: when its cluster is due for a round, and what it brings to one."""

from __future__ import annotations

from ravnest.wire.messages import RoundRequest

MOST_OF_AN_EPOCH = 0.75
"""Clusters end their epochs at different times: one that others have just asked for is enough."""
SHORTEST = 2.0
"""Seconds between rounds that nobody counted out: each costs every node some hundredths of a second of
a core, however small the model, and should cost training less than 2% of its time."""
NEWEST = 0.2
"""Share of the newest gap between updates in the average of all."""


class RoundTrigger:
    """Updates and samples since the last round, and how long they take.

    ``reduce_factor`` updates make a cluster due; with None the end of an epoch does, and several
    epochs share a round where they are shorter than ``SHORTEST``. What a cluster brings is all samples
    since the last average that it applied: a round that came to nothing, or that it missed, takes
    nothing away. Updates count since the cluster last asked or was asked, so that a round that fails
    is not asked for again at every update.
    """

    def __init__(self, cluster: int, reduce_factor: int | None) -> None:
        assert reduce_factor is None or reduce_factor >= 1, f"a round every {reduce_factor} updates"
        self._cluster = cluster
        self._reduce_factor = reduce_factor
        self.updates = 0
        """So far, in all."""
        self.samples = 0
        """Since the last average that was applied here."""
        self.pending: RoundRequest | None = None
        """What the coordinator has not answered; whoever takes over from it gets it again."""
        self._since = 0
        self._epoch_over = False
        self._epoch_updates = 0
        self._this_epoch = 0
        self._held = 0
        self._held_pending: RoundRequest | None = None
        self._gap = 0.0
        self._last_update: float | None = None
        self._epoch = 0.0
        self._last_epoch: float | None = None
        self._now = 0.0
        self._counted_from: float | None = None
        """When counting started anew."""

    def updated(self, samples: int, now: float) -> None:
        """An update was made, of so many samples."""
        self._pass(now)
        if self._last_update is not None:
            gap = now - self._last_update
            self._gap = gap if not self._gap else (1 - NEWEST) * self._gap + NEWEST * gap
        if self._last_epoch is None:
            self._last_epoch = now
        self._last_update = now
        self.updates += 1
        self._since += 1
        self._this_epoch += 1
        self.samples += samples

    def epoch_ended(self, now: float) -> None:
        """All updates of an epoch are made."""
        self._pass(now)
        if self._last_epoch is not None:
            self._epoch = now - self._last_epoch
        self._last_epoch = now
        self._last_update = None
        self._epoch_over = self._this_epoch > 0
        self._epoch_updates, self._this_epoch = self._this_epoch, 0

    def paused(self) -> None:
        """The time until the next update is not that of training: a validation, or a wait."""
        self._last_update = None

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask for a round."""
        if self._reduce_factor is None:
            lately = self._counted_from is not None and self._now - self._counted_from < SHORTEST
            enough = self._since >= MOST_OF_AN_EPOCH * self._epoch_updates
            return self._epoch_over and enough and not lately
        return self._since >= self._reduce_factor

    @property
    def interval(self) -> float:
        """Seconds of training between two rounds; 0 while not known."""
        if self._reduce_factor is not None:
            return self._gap * self._reduce_factor
        return max(self._epoch, SHORTEST) if self._epoch else 0.0

    def ask(self, *, final: bool = False) -> RoundRequest:
        """The Due to send now; counting starts anew."""
        self._start_anew()
        self.pending = RoundRequest(self._cluster, self.updates, self.samples, self.interval, final)
        return self.pending

    def hold(self) -> int:
        """The parameters as they are now are held for a round; the samples that they stand for."""
        self._start_anew()
        self._held, self._held_pending = self.samples, self.pending
        return self._held

    def settled(self, *, commit: bool, assign: bool) -> None:
        """The round that was held for, or waited for, is over.

        A wait for the final round goes on through rounds of the others, those without ``assign``.
        """
        if commit:
            self.samples -= self._held
        self._held = 0
        final = self.pending is not None and self.pending.final
        if assign or (self.pending is self._held_pending and not final):
            self.pending = None
        self._held_pending = None

    def _pass(self, now: float) -> None:
        self._now = now
        if self._counted_from is None:
            self._counted_from = now

    def _start_anew(self) -> None:
        self._since, self._epoch_over = 0, False
        self._counted_from = self._now
