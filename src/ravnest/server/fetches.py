"""How long a provider may take to fetch its part of a job. Pure."""

from __future__ import annotations

from ravnest.api.providers import Assignment, Offer
from ravnest.server.needs import needed_by

FETCHING = ("waiting", "fetching")
"""Phases before a part trains."""
_SLACK = 4.0
"""Times what the measured bandwidth explains: several fetch at once, and bandwidth varies."""


def fetch_limit(assignment: Assignment, offer: Offer, grace: float) -> float:
    """Seconds after which a provider is taken to be stuck."""
    size = sum(artifact.size for artifact in needed_by(assignment))
    return grace + _SLACK * 8 * size / (offer.bandwidth * 1e6)
