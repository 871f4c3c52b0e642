"""Tests of the links between providers, before a job starts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ravnest.schemas.base import Name, Reason, Schema, TolerantSchema
from ravnest.schemas.reachability import HostAndPort
from ravnest.store.node_spec import RelaySpec

Rate = Annotated[float, Field(gt=0, le=1e7)]
"""Mbit/s."""
LinkRoute = Literal["direct", "relayed"]
Seconds = Annotated[float, Field(ge=0, le=3600)]


class LinkTestOrder(Schema):
    """Request of the server to measure the link to another provider."""

    id: str
    listens: bool
    """True: listen and answer. False: dial, measure and report."""
    node: int
    """Number of this provider in the test."""
    peer: int
    peer_name: Name
    addresses: tuple[HostAndPort, ...]
    """Addresses of the provider that listens, the first decides whether the connection uses TLS."""
    tls: bool
    relay: RelaySpec | None = None
    secret: str = Field(default="", repr=False)
    """Secret that both prove to each other without TLS."""


class LinkTestResult(Schema):
    """Result of a test, from the provider that dialled; the one that listens reports only failures."""

    failure: Reason = ""
    """Why there are no figures; empty if there are."""
    to_listener: Rate | None = None
    """Mbit/s from the provider that dialled to the one that listens."""
    to_dialer: Rate | None = None
    round_trip: Seconds = 0.0
    route: LinkRoute = "direct"


class LinkView(TolerantSchema):
    """Newest figures of a link, as members see them."""

    one: str
    """Id of a provider."""
    other: str
    names: tuple[str, str]
    time: float
    """Time of the measurement, in seconds since 1970."""
    failure: Reason
    """Why they could not connect; empty if they could."""
    route: LinkRoute
    forward: float
    """Mbit/s from ``one`` to ``other``; 0 if they could not connect."""
    back: float
    round_trip: float
    """Seconds."""
