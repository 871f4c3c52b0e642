"""``run_relay``: this machine forwards bytes between nodes that cannot reach each other."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ravnest.deadlines import FIRST_PAUSE, JITTER, LONGEST_PAUSE, POLL_ANSWER, POLL_GAP, POLL_WAIT
from ravnest.errors import ServerError, ServerRefusedError, SettingsError
from ravnest.http.api import ApiClient, pause_after
from ravnest.provider.addresses import addresses
from ravnest.provider.membership import machine_membership
from ravnest.provider.signals import interrupts
from ravnest.relay.limits import RelayLimits
from ravnest.relay.service import Relay, RelayCounters
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.reachability import RelayHeartbeat, RelayReply
from ravnest.types import Address

logger = logging.getLogger(__name__)

DEFAULT_RELAY_PORT = 7101
_FINAL = (401, 403)
"""HTTP statuses after which trying again is useless."""


class RunningRelay(Protocol):
    """The part of a relay that its server controls."""

    def set_running_jobs(self, jobs: frozenset[str] | None) -> None:
        """Serve only these jobs."""

    def counters(self) -> RelayCounters:
        """Return the counters of this moment."""


def run_relay(
    server: str,
    token: str | None = None,
    *,
    name: str | None = None,
    listen: str | None = None,
    address: Sequence[str] = (),
    capacity: float | None = None,
    say: Callable[[str], None],
) -> None:
    """Run a relay for the jobs of a server until it is interrupted.

    ``listen`` and ``address`` say where it listens and where nodes reach it, as for providers.
    ``capacity`` limits what it forwards, in Mbit/s. Raises ``ServerError`` if the server cannot be
    reached at the start or refuses the relay, ``SettingsError`` if an argument is wrong.
    """
    if capacity is not None and not capacity > 0:
        raise SettingsError(f"the capacity must be more than 0 Mbit/s, not {capacity:g}")
    own_name = (name or socket.gethostname())[:100]
    with addresses(server, listen or f":{DEFAULT_RELAY_PORT}", address) as found:
        member = machine_membership(server, token, own_name, ApiRole.RELAY)
        with member.api() as api:
            first = RelayHeartbeat(name=own_name, addresses=found.known, capacity=capacity)
            reply = api.post("/api/relays", first, RelayReply, idempotent=True)
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(reply.public_key))
            limits = RelayLimits(mbit_per_second=capacity)
            relay = Relay(Address.parse(found.listen), key, limits)
            relay.start()
            try:
                say(f"{own_name} forwards for {member.url} at {', '.join(found.known)}, until Ctrl-C")
                loop = RelayHeartbeats(api, relay, first, say)
                with interrupts(loop.stop):
                    loop.run()
            finally:
                relay.close()


@dataclass
class RelayHeartbeats:
    """Reports to the server that a relay works, and tells the relay which jobs run."""

    api: ApiClient
    relay: RunningRelay
    beat: RelayHeartbeat
    """Part that all heartbeats share."""
    say: Callable[[str], None]
    _stopped: threading.Event = field(default_factory=threading.Event)
    _error: ServerError | None = None

    def run(self) -> None:
        """Send heartbeats until ``stop``, then leave; raise if the server refuses the relay."""
        threading.Thread(target=self._send_all, name="relay heartbeats", daemon=True).start()
        self._stopped.wait()
        if self._error is not None:
            raise self._error
        try:
            self.api.delete("/api/relays")
        except ServerError as error:
            logger.info("the server was not told that this relay ends: %s", error)

    def stop(self) -> None:
        """Have ``run`` return."""
        self._stopped.set()

    def _send_all(self) -> None:
        known: tuple[str, ...] | None = None
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            try:
                reply = self._send(known, wait=POLL_WAIT if pause == FIRST_PAUSE else 0.0)
            except ServerError as error:
                if isinstance(error, ServerRefusedError) and error.status in _FINAL:
                    self._error = error
                    self._stopped.set()
                    return
                if pause == FIRST_PAUSE and not self._stopped.is_set():
                    self.say(f"{error}; the relay continues and tries again")
                jitter = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
                self._stopped.wait(pause_after(error, pause * jitter))
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if pause > FIRST_PAUSE:
                self.say("the server answers again")
            pause = FIRST_PAUSE
            if reply.running_jobs != known:
                known = reply.running_jobs
                self.relay.set_running_jobs(frozenset(known))
            self._stopped.wait(POLL_GAP)

    def _send(self, known: tuple[str, ...] | None, wait: float) -> RelayReply:
        counters = self.relay.counters()
        now = {"circuits": counters.circuits, "forwarded": counters.bytes, "known": known, "wait": wait}
        beat = self.beat.model_copy(update=now)
        return self.api.post("/api/relays", beat, RelayReply, wait=wait, within=POLL_ANSWER)
