"""States of providers and jobs, and the allowed transitions between them. Pure."""

from __future__ import annotations

from typing import Literal

from ravnest.errors import RavnestError
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import ProviderState

Kind = Literal["provider", "job"]

NEW = ""
"""State before the first one."""

_P = ProviderState
_J = JobState

_PROVIDER: dict[str, frozenset[str]] = {
    NEW: frozenset({_P.OFFERED}),
    _P.OFFERED: frozenset({_P.RESERVED, _P.LOST}),
    _P.RESERVED: frozenset({_P.TRAINING, _P.OFFERED, _P.LOST}),
    _P.TRAINING: frozenset({_P.OFFERED, _P.LOST}),
    # Directly back to work if it has trained to the end and returns with the result.
    _P.LOST: frozenset({_P.OFFERED, _P.TRAINING}),
}
_JOB: dict[str, frozenset[str]] = {
    NEW: frozenset({_J.SUBMITTED}),
    _J.SUBMITTED: frozenset({_J.PLANNED, _J.FAILED, _J.CANCELLED}),
    # Back to the queue if a provider was lost, or the server stopped, before anything was shipped.
    _J.PLANNED: frozenset({_J.SHIPPING, _J.SUBMITTED, _J.FAILED, _J.CANCELLED}),
    # Directly to done if all nodes ended between two reports.
    # Back to the queue to be planned anew, if a provider was lost and no other one can take its place.
    _J.SHIPPING: frozenset({_J.TRAINING, _J.SUBMITTED, _J.DONE, _J.FAILED, _J.CANCELLED}),
    _J.TRAINING: frozenset({_J.SUBMITTED, _J.DONE, _J.FAILED, _J.CANCELLED}),
    _J.DONE: frozenset(),
    _J.FAILED: frozenset(),
    _J.CANCELLED: frozenset(),
}
TRANSITIONS: dict[Kind, dict[str, frozenset[str]]] = {"provider": _PROVIDER, "job": _JOB}


class TransitionError(RavnestError):
    """A transition that the lifecycle does not allow."""


def check_transition(kind: Kind, before: str, after: str) -> None:
    """Raise ``TransitionError`` unless a provider or a job may go from one state to the other."""
    if after not in TRANSITIONS[kind][before]:
        was = f"is {before}" if before else "does not exist yet"
        raise TransitionError(f"a {kind} that {was} cannot become {after}")
