"""Routes to this provider: addresses that the server reaches, and relays that answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ravnest.deadlines import DIAL_BACK, RELAY_MEASURE
from ravnest.errors import ServerRefusedError, TransportError
from ravnest.http.api import ApiClient
from ravnest.provider.addresses import MOST_ADDRESSES, Addresses
from ravnest.provider.dial_back import dial_back_listener, new_nonce
from ravnest.relay.round_trip import relay_round_trip
from ravnest.schemas.providers import MOST_RELAYS, ProviderOffer
from ravnest.schemas.reachability import (
    AddressCheck,
    DialBackReply,
    DialBackRequest,
    RelayTrip,
    RelayView,
)
from ravnest.types import Address

logger = logging.getLogger(__name__)

_AT_ONCE = 8
"""Relays that are measured at the same time."""

RoundTrip = Callable[[Sequence[Address], float], float | None]
"""Function that returns the seconds to a relay and back; ``None`` if it does not answer in time."""


@dataclass(frozen=True)
class RouteFinder:
    """Finds the routes to this provider, before each offer."""

    api: ApiClient
    addresses: Addresses
    round_trip: RoundTrip = relay_round_trip

    def complete(self, offer: ProviderOffer) -> ProviderOffer:
        """Return the offer with the routes of now.

        The offer stays as it is while a worker listens at the port, and if the server has checked
        the addresses just now.
        """
        try:
            reply = self._dial_back()
        except (OSError, ServerRefusedError) as error:
            logger.info("the addresses of this provider were not checked: %s", error)
            return offer
        known = announced(self.addresses.known, reply.checks)
        trips = self._trips(reply.relays)
        return offer.model_copy(update={"address": known[0], "addresses": known, "relay_trips": trips})

    def _dial_back(self) -> DialBackReply:
        nonce = new_nonce()
        with dial_back_listener(Address.parse(self.addresses.listen), nonce) as fingerprint:
            request = DialBackRequest(
                addresses=self.addresses.known,
                port=self.addresses.port,
                fingerprint=fingerprint,
                nonce=nonce,
            )
            return self.api.post("/api/providers/dial-back", request, DialBackReply, wait=DIAL_BACK)

    def _trips(self, relays: Sequence[RelayView]) -> tuple[RelayTrip, ...]:
        def measured(relay: RelayView) -> RelayTrip | None:
            try:
                addresses = tuple(map(Address.parse, relay.addresses))
                seconds = self.round_trip(addresses, RELAY_MEASURE)
            except (TransportError, OSError, ValueError) as error:
                logger.info("the relay %s cannot be measured: %s", relay.name, error)
                return None
            return None if seconds is None else RelayTrip(relay=relay.id, seconds=seconds)

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = threads.map(measured, relays[:MOST_RELAYS])
        return tuple(trip for trip in found if trip is not None)


def announced(own: Sequence[str], checks: Sequence[AddressCheck]) -> tuple[str, ...]:
    """Return the addresses to announce: those that the server reached first, and its view of ours last.

    The address that the server sees is announced even if it was not reached: an owner can open the
    port later, and two providers behind two routers differ in it.
    """
    reached = [check.address for check in checks if check.reachable]
    observed = [check.address for check in checks if check.address not in own][:1]
    kept = [each for each in dict.fromkeys((*reached, *own)) if each in (*own, *observed)]
    return tuple(dict.fromkeys((*kept[: MOST_ADDRESSES - len(observed)], *observed)))
