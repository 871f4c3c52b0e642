"""Counts a cluster's updates and samples, and decides when it requests a round. Pure."""

from __future__ import annotations

from ravnest.wire.messages import RoundRequest

MIN_EPOCH_SHARE = 0.75
"""Share of an epoch's updates since the last round below which the end of the epoch requests none.

Clusters end their epochs at different times: a round that another cluster has just requested suffices.
"""
MIN_INTERVAL = 2.0
"""Seconds between rounds without a ``reduce_factor``: a round costs every node some 10 ms of a core,
even with a small model, and should take less than 2% of the training time."""
NEWEST_SHARE = 0.2
"""Weight of the newest measurement in the moving average of the time between updates."""


class RoundTrigger:
    """Updates and samples since the last round, and the time that they take.

    A cluster requests a round after ``reduce_factor`` updates; with None at the end of an epoch, where
    epochs shorter than ``MIN_INTERVAL`` share a round. Samples count since the last average that the
    cluster applied: a round that failed, or that it missed, subtracts nothing. Updates count since the
    cluster last requested a round or copied its parameters for one, so that a failed round is not
    requested again at every update.
    """

    def __init__(self, cluster: int, reduce_factor: int | None) -> None:
        assert reduce_factor is None or reduce_factor >= 1, f"a round every {reduce_factor} updates"
        self._cluster = cluster
        self._reduce_factor = reduce_factor
        self.updates = 0
        """All updates so far."""
        self.samples = 0
        """Samples since the last average that was applied here."""
        self.averaged = 0
        """Samples in the averages that were applied here."""
        self.newest = -1
        """Number of the newest round whose average was applied here."""
        self._went_back = False
        """A node was lost and the cluster went back to a checkpoint; it has applied no average since."""
        self._asks_at_once = False
        self.call = 0
        """Number of the script's call that the cluster trains in; 0 if unknown."""
        self.pending: RoundRequest | None = None
        """The request that the coordinator has not answered; a new coordinator gets it again."""
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
        """Time at which the count last restarted."""

    def continue_from(
        self, updates: int, samples: int, newest: int = -1, *, after_loss: bool = False
    ) -> None:
        """Continue a run from a checkpoint: rounds are requested at the same updates as without a stop.

        ``updates`` is the number of all updates so far, ``samples`` that of the samples since the last
        average, ``newest`` the number of its round. ``after_loss``: the other clusters may have
        averaged since; a round is requested at the first update, to catch up with them.
        """
        self.updates, self.samples, self.newest = updates, samples, newest
        self._went_back = self._asks_at_once = after_loss
        self._since = 0 if self._reduce_factor is None else updates % self._reduce_factor

    def is_behind(self, number: int) -> bool:
        """Return True if the cluster went back behind rounds that came before this one.

        Its parameters lack the updates of the other clusters since then, while theirs contain its own.
        """
        return self._went_back and number > self.newest + 1

    def updated(self, samples: int, now: float) -> None:
        """Count an update of ``samples`` samples."""
        self._pass(now)
        if self._last_update is not None:
            gap = now - self._last_update
            self._gap = gap if not self._gap else (1 - NEWEST_SHARE) * self._gap + NEWEST_SHARE * gap
        if self._last_epoch is None:
            self._last_epoch = now
        self._last_update = now
        self.updates += 1
        self._since += 1
        self._this_epoch += 1
        self.samples += samples

    def epoch_ended(self, now: float) -> None:
        """Count the end of an epoch; all its updates are made."""
        self._pass(now)
        if self._last_epoch is not None:
            self._epoch = now - self._last_epoch
        self._last_epoch = now
        self._last_update = None
        self._epoch_over = self._this_epoch > 0
        self._epoch_updates, self._this_epoch = self._this_epoch, 0

    def paused(self) -> None:
        """Leave the time until the next update out of the measurement: training has paused."""
        self._last_update = None

    @property
    def is_due(self) -> bool:
        """True if the cluster should request a round."""
        if self._asks_at_once:
            return True
        if self._reduce_factor is None:
            lately = self._counted_from is not None and self._now - self._counted_from < MIN_INTERVAL
            enough = self._since >= MIN_EPOCH_SHARE * self._epoch_updates
            return self._epoch_over and enough and not lately
        return self._since >= self._reduce_factor

    @property
    def interval(self) -> float:
        """Seconds of training between two rounds; 0 while unknown."""
        if self._reduce_factor is not None:
            return self._gap * self._reduce_factor
        return max(self._epoch, MIN_INTERVAL) if self._epoch else 0.0

    def request(self, *, final: bool = False, kept: bool = False, call: int = 0) -> RoundRequest:
        """Return the request to send now, and restart the count of updates."""
        self._restart()
        self._asks_at_once = False
        self.call = max(call, self.call)
        self.pending = RoundRequest(
            self._cluster, self.updates, self.samples, self.interval, final, kept, self.call
        )
        return self.pending

    def hold(self) -> int:
        """Note that the parameters were copied for a round; return the samples that they stand for."""
        self._restart()
        self._held, self._held_pending = self.samples, self.pending
        return self._held

    def settled(self, number: int, *, commit: bool, assign: bool) -> None:
        """Note the end of the round ``number``, which the cluster took part in or waited for.

        A request for the final round stays pending through rounds without ``assign``, which are
        those of the other clusters.
        """
        if commit:
            self.samples -= self._held
            self.averaged += self._held
            self.newest, self._went_back = number, False
        self._held = 0
        final = self.pending is not None and self.pending.final
        if final and assign and not commit:
            self.call += 1  # that call is over
        if assign or (self.pending is self._held_pending and not final):
            self.pending = None
        self._held_pending = None

    def _pass(self, now: float) -> None:
        self._now = now
        if self._counted_from is None:
            self._counted_from = now

    def _restart(self) -> None:
        self._since, self._epoch_over = 0, False
        self._counted_from = self._now
