"""Reachability of a provider, decided from the addresses that answered and the relays. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ravnest.schemas.providers import ProviderOffer
from ravnest.schemas.reachability import AddressCheck, Reachability, RelayView
from ravnest.types import Address

_SHOWN = 3
"""Addresses whose problems are told."""
_UNTESTED = Reachability(kind="direct", reason="its addresses were not tested")


def reachability(
    offer: ProviderOffer, checks: Sequence[AddressCheck], relays: Mapping[str, RelayView]
) -> Reachability:
    """Return how others reach a provider; ``relays`` are those that the server knows to work now."""
    if not checks:
        return _UNTESTED
    announced = offer.all_addresses
    reached = next((each for each in checks if each.reachable and each.address in announced), None)
    if reached is not None:
        return Reachability(kind="direct", reason=f"the server reaches it at {reached.address}")
    failed = f"the server cannot reach it ({_problems(checks)})"
    port = Address.parse(offer.address).port
    direct = f"open TCP port {port} in its firewall and router, or give --address"
    trips = [trip for trip in offer.relay_trips if trip.relay in relays]
    if trips:
        nearest = min(trips, key=lambda trip: trip.seconds)
        through = f"through the relay {relays[nearest.relay].name} ({1000 * nearest.seconds:.1f} ms)"
        return Reachability(
            kind="relayed",
            reason=f"{failed}; others reach it {through}. For direct connections, {direct}",
        )
    tried = ", ".join(relay.addresses[0] for relay in list(relays.values())[:_SHOWN] if relay.addresses)
    lacking = f"no relay answers it ({tried})" if relays else "this server has no relay"
    return Reachability(
        kind="unreachable",
        reason=f"{failed}, and {lacking}. It is used only for jobs that fit on it alone: {direct}, or "
        "run a relay (`ravnest serve --relay`, `ravnest relay --server URL`)",
    )


def _problems(checks: Sequence[AddressCheck]) -> str:
    """Return the problems of the first addresses and of the last, which the request came from."""
    shown = checks if len(checks) <= _SHOWN else (*checks[: _SHOWN - 1], checks[-1])
    by_reason: dict[str, list[str]] = {}
    for check in shown:
        by_reason.setdefault(check.reason, []).append(check.address)
    return "; ".join(f"{' and '.join(texts)}: {reason}" for reason, texts in by_reason.items())
