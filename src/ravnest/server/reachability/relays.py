"""Relays of a server: the one that it runs itself, and those that have joined it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ravnest.errors import ServerError, ServerRefusedError
from ravnest.relay.tickets import RelayTicket, sign_ticket
from ravnest.schemas.providers import ProviderOffer
from ravnest.schemas.reachability import RelayHeartbeat, RelayReply, RelayView
from ravnest.server.db.jobs import RUNNING
from ravnest.server.folder import ServerFolder, write_private
from ravnest.server.reachability.routes import nearest_relays, with_relays
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWorkFactory
from ravnest.store.node_spec import NodeSpec, RelaySpec
from ravnest.types import Address

OWN_RELAY = "server"
"""Id of the relay that the server runs itself."""
_MOST_RELAYS = 64
_TICKET_SECONDS = 30 * 86400.0
"""Lifetime of a ticket: longer than any job. Relays end the circuits of jobs that do not run."""


@dataclass(frozen=True)
class _Entry:
    view: RelayView
    seen: float | None
    """Time of its last heartbeat; ``None`` for the server's own relay."""


class RelayRegistry:
    """Relays that work now, in memory: they register again after a start of the server. Thread-safe."""

    def __init__(self, clock: Callable[[], float], lost_after: float) -> None:
        """``clock`` is monotonic; a relay that is silent for ``lost_after`` seconds is left out."""
        self._clock = clock
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def put(self, view: RelayView, *, is_own: bool = False) -> bool:
        """Add or update a relay; return whether providers can use it only since now."""
        with self._lock:
            self._forget_silent()
            known = self._entries.get(view.id)
            if known is None and len(self._entries) >= _MOST_RELAYS:
                raise ServerRefusedError(f"this server has {_MOST_RELAYS} relays already", 409)
            self._entries[view.id] = _Entry(view, None if is_own else self._clock())
            return known is None or known.view.addresses != view.addresses

    def remove(self, relay: str) -> bool:
        """Remove a relay; return whether it was known."""
        with self._lock:
            return self._entries.pop(relay, None) is not None

    def live(self) -> dict[str, RelayView]:
        """Return the relays that work now, by id."""
        with self._lock:
            self._forget_silent()
            return {relay: entry.view for relay, entry in self._entries.items()}

    def _forget_silent(self) -> None:
        earliest = self._clock() - self._lost_after
        self._entries = {
            relay: entry
            for relay, entry in self._entries.items()
            if entry.seen is None or entry.seen > earliest
        }


class OwnRelay(Protocol):
    """The relay that the server runs itself, as far as it is controlled."""

    def set_running_jobs(self, jobs: frozenset[str] | None) -> None:
        """Serve only these jobs."""


class RelayService:
    """Operations on relays, and the tickets for them; thread-safe."""

    def __init__(self, units: UnitOfWorkFactory, folder: ServerFolder, settings: ServerSettings) -> None:
        self._units = units
        self._folder = folder
        self._registry = RelayRegistry(units.clock.steady, settings.lost_after)
        self._key: Ed25519PrivateKey | None = None
        self._own: OwnRelay | None = None

    def open(self) -> None:
        """Load the key for tickets; create it at the first start."""
        path = self._folder.relay_key
        if not path.exists():
            write_private(path, _private_bytes(Ed25519PrivateKey.generate()))
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except ValueError as error:
            raise _damaged(self._folder) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise _damaged(self._folder)
        self._key = key

    @property
    def public_key(self) -> Ed25519PublicKey:
        """Key by which relays check tickets."""
        return self._signing_key.public_key()

    def live(self) -> dict[str, RelayView]:
        """Return the relays that work now, by id."""
        return self._registry.live()

    def put_own(self, relay: OwnRelay, addresses: Sequence[Address]) -> None:
        """Register the relay that the server runs itself."""
        self._own = relay
        texts = tuple(map(str, addresses))
        view = RelayView(id=OWN_RELAY, name="of the server", addresses=texts)
        if self._registry.put(view, is_own=True):
            self._changed(f"the relay of the server listens: {', '.join(texts)}")

    def tell_own(self) -> None:
        """Tell the server's own relay which jobs run."""
        if self._own is not None:
            self._own.set_running_jobs(frozenset(self.reply().running_jobs))

    def heartbeat(self, relay: str, heartbeat: RelayHeartbeat) -> None:
        """Register a relay, or note that it works; refuse (422) addresses that cannot be used."""
        try:
            addresses = tuple(str(Address.parse(text)) for text in heartbeat.addresses)
        except ValueError as error:
            raise ServerRefusedError(f"nodes cannot use this address: {error}", 422) from error
        view = RelayView(
            id=relay,
            name=heartbeat.name,
            addresses=addresses,
            capacity=heartbeat.capacity,
            circuits=heartbeat.circuits,
            forwarded=heartbeat.forwarded,
        )
        if self._registry.put(view):
            self._changed(f"the relay {heartbeat.name} joined: {', '.join(addresses)}")

    def leave(self, relay: str, reason: str) -> None:
        """Remove a relay."""
        if self._registry.remove(relay):
            self._changed(reason)

    def reply(self) -> RelayReply:
        """Return what relays need to know."""
        with self._units.db.read() as db:
            jobs = sorted(job.id for job in db.jobs.in_state(*RUNNING))
        return RelayReply(public_key=self.public_key.public_bytes_raw().hex(), running_jobs=tuple(jobs))

    def add_tickets(
        self, job: str, specs: Sequence[NodeSpec], offers: Sequence[ProviderOffer]
    ) -> list[NodeSpec]:
        """Return the specs of a job with access to the relays that are nearest to its providers."""
        relays = nearest_relays(self.live().values(), offers)
        return with_relays(specs, job, relays, lambda node, peers: self._ticket(job, node, peers))

    def access(
        self, job: str, node: int, peers: tuple[int, ...], offers: Sequence[ProviderOffer]
    ) -> RelaySpec | None:
        """Return the access of one node of a planned job to relays; ``None`` if there are none."""
        relays = nearest_relays(self.live().values(), offers)
        addresses = tuple(relay.addresses for relay in relays)
        return RelaySpec(job, self._ticket(job, node, peers), addresses) if relays else None

    def _ticket(self, job: str, node: int, peers: tuple[int, ...]) -> str:
        expires = self._units.clock.wall() + _TICKET_SECONDS
        return sign_ticket(RelayTicket(job, node, peers, expires), self._signing_key)

    @property
    def _signing_key(self) -> Ed25519PrivateKey:
        assert self._key is not None, "open() loads it"
        return self._key

    def _changed(self, what: str) -> None:
        """Add an event; providers may be reachable now that were not, or the other way round."""
        with self._units.begin() as uow:
            uow.db.events.add("server", "relay", what)
            uow.needs_matching = True


def _private_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _damaged(folder: ServerFolder) -> ServerError:
    return ServerError(f"{folder.relay_key} is damaged: remove it, and start the server again")
