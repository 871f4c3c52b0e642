"""Estimates of jobs before they are submitted; nothing is stored or reserved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ravnest.errors import RavnestError, ServerRefusedError
from ravnest.schemas.base import clipped
from ravnest.schemas.estimates import EstimateRequest, JobEstimate, ProviderRam
from ravnest.schemas.providers import ProviderOffer, ProviderState
from ravnest.schemas.reachability import RelayView
from ravnest.server.db.database import Database
from ravnest.server.db.records import ProviderRecord
from ravnest.server.scheduling.link_tests import ProviderLinks
from ravnest.server.scheduling.matching import strongest_first, unreachable_of
from ravnest.server.scheduling.planner_messages import EstimateQuestion

_BUSY_PAUSE = 3.0
"""Seconds after which a requester tries again while the server makes another estimate."""
_LONGEST_WAIT = 20.0
"""Seconds for which a requester waits for its turn."""
_MOST_WAITING = 4
"""Requesters that wait for their turn, each in a thread of the server."""


class JobEstimator(Protocol):
    """Plans a job and returns what the plan takes; takes seconds of CPU time."""

    def estimate(self, question: EstimateQuestion) -> JobEstimate:
        """Return the estimate, also of a job without a plan; raise ``JobError`` if there is none."""
        ...


class EstimateService:
    """Makes one estimate at a time, of each requester in turn; requests cannot take all threads."""

    def __init__(
        self,
        db: Database,
        estimator: JobEstimator,
        live_relays: Callable[[], Mapping[str, RelayView]],
        links_between: Callable[[Mapping[str, ProviderOffer]], ProviderLinks],
    ) -> None:
        self._db = db
        self._estimator = estimator
        self._live_relays = live_relays
        self._links_between = links_between
        self._turn = threading.Condition()
        self._queue: list[str] = []
        """Members whose estimates are made, the first one now."""

    def estimate(self, member: str, request: EstimateRequest) -> JobEstimate:
        """Estimate a job for the idle providers, or for all that are connected if those are too few.

        Refuse (422) what does not describe a job, and (429) a second estimate of a member, or one while
        many others wait.
        """
        with self._turn:
            if member in self._queue or len(self._queue) > _MOST_WAITING:
                raise _busy()
            self._queue.append(member)
            is_next = self._turn.wait_for(lambda: self._queue[0] == member, _LONGEST_WAIT)
            if not is_next:
                self._queue.remove(member)
                raise _busy()
        try:
            return self._estimate(request)
        except ServerRefusedError:
            raise
        except RavnestError as error:
            raise ServerRefusedError(f"the job cannot be estimated: {error}", 422) from error
        finally:
            with self._turn:
                self._queue.remove(member)
                self._turn.notify_all()

    def _estimate(self, request: EstimateRequest) -> JobEstimate:
        with self._db.read() as db:
            present = db.providers.present()
        unreachable = unreachable_of(present, self._live_relays())
        everybody = strongest_first(present, unreachable)
        idle = [each for each in everybody if each.state is ProviderState.OFFERED]
        listed = tuple(
            ProviderRam(
                name=each.offer.name,
                ram_bytes=each.offer.ram * 1e9,
                idle=each.state is ProviderState.OFFERED,
            )
            for each in everybody
        )
        now = self._ask(request, idle, unreachable)
        if now.fits or len(idle) == len(everybody):
            return now.model_copy(update={"providers": listed})
        later = self._ask(request, everybody, unreachable)
        reason = later.reason
        if later.fits:
            busy = len(everybody) - len(idle)
            reason = f"it waits for providers that are at work now ({busy} of them): {now.reason}"
        update = {"providers": listed, "starts_now": False, "reason": clipped(reason)}
        return later.model_copy(update=update)

    def _ask(
        self,
        request: EstimateRequest,
        providers: Sequence[ProviderRecord],
        unreachable: Mapping[str, str],
    ) -> JobEstimate:
        chosen = tuple((each.id, each.offer) for each in providers[: request.spec.max_providers])
        names = {name: shown for name, shown in unreachable.items() if name in dict(chosen)}
        return self._estimator.estimate(
            EstimateQuestion(
                request.spec, request.profiles, chosen, names, self._links_between(dict(chosen))
            )
        )


def _busy() -> ServerRefusedError:
    return ServerRefusedError(
        "the server estimates another job now: try again in a few seconds", 429, _BUSY_PAUSE
    )
