"""Node side of relays: registrations that are kept up, and circuits to the node's own listener."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Callable

from ravnest.deadlines import (
    JITTER,
    LINK_CLOSE,
    RELAY_DIAL,
    RELAY_FIRST_PAUSE,
    RELAY_LONGEST_PAUSE,
)
from ravnest.errors import TransportError
from ravnest.relay.access import RelayAccess
from ravnest.relay.control import ControlConnection
from ravnest.relay.heads import RelayMethod, request
from ravnest.relay.incoming import IncomingCircuit
from ravnest.relay.loop import EventLoop
from ravnest.relay.pipes import PipePool
from ravnest.relay.sockets import SocketAddress, dial_first, resolve
from ravnest.relay.splicing import Splicer
from ravnest.types import Address

logger = logging.getLogger(__name__)

_MOST_CIRCUITS = 256
"""Circuits of a node at a time; a relay that announces more is not trusted."""

Say = Callable[[str], None]
"""Called with a sentence for the user, from several threads."""


class RelayListener:
    """Registrations of a node at relays, through which peers reach its listener at ``target``.

    One thread forwards all circuits and answers all relays; one per relay dials.
    """

    def __init__(
        self,
        access: RelayAccess,
        target: Address,
        say: Say = logger.info,
        pipes: PipePool | None = None,
    ) -> None:
        self._access = access
        self._target = target
        self._say = say
        self._loop = EventLoop(f"relayed circuits of {access.endpoint}")
        self._splicer = Splicer(self._loop, pipes or PipePool())
        self._condition = threading.Condition()
        self._registered: set[int] = set()
        self._controls: dict[int, ControlConnection] = {}
        self._incoming: set[IncomingCircuit] = set()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Register at all relays, in the background."""
        places = resolve([self._target], RELAY_DIAL)
        if not places:
            raise TransportError(f"{self._target}, where relayed circuits would end, is not an address")
        self._loop.start()
        for number in range(len(self._access.relays)):
            thread = threading.Thread(
                target=self._keep_registered,
                args=(number, places[0]),
                name=f"registration at relay {number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    @property
    def registered(self) -> tuple[tuple[Address, ...], ...]:
        """Addresses of each relay at which the node is registered now, the preferred one first."""
        with self._condition:
            return tuple(self._access.relays[number] for number in sorted(self._registered))

    def wait_registered(self, timeout: float) -> bool:
        """Wait until the node is registered at one relay; return whether it is after ``timeout``."""
        with self._condition:
            return self._condition.wait_for(
                lambda: bool(self._registered) or self._closing.is_set(), timeout
            ) and bool(self._registered)

    def close(self) -> None:
        """End all registrations and circuits."""
        self._closing.set()
        with self._condition:
            self._condition.notify_all()
        self._loop.call(self._end)
        self._loop.close(LINK_CLOSE)
        for thread in self._threads:
            thread.join(LINK_CLOSE)

    # Threads that dial

    def _keep_registered(self, number: int, target: SocketAddress) -> None:
        """Register at a relay whenever the node is not, with growing pauses."""
        addresses = self._access.relays[number]
        pause, told = RELAY_FIRST_PAUSE, ""
        while not self._closing.is_set():
            reason = f"none of {', '.join(map(str, addresses))} answers"
            connection = dial_first(addresses, RELAY_DIAL)
            if connection is not None:
                was_registered, reason = self._run_control(number, connection, target)
                if was_registered:
                    pause, told = RELAY_FIRST_PAUSE, ""
            if self._closing.is_set():
                return
            if reason != told:
                told = reason
                self._say(f"not registered at the relay {addresses[0]}, trying again: {reason}")
            self._closing.wait(pause * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 - no secret
            pause = min(2 * pause, RELAY_LONGEST_PAUSE)

    def _run_control(
        self, number: int, connection: socket.socket, target: SocketAddress
    ) -> tuple[bool, str]:
        """Use a connection to a relay until it ends; return whether it registered, and why it ended."""
        ended = threading.Event()
        outcome = (False, "this node is closing")
        relay: SocketAddress = (connection.family, connection.getpeername())

        def on_registered() -> None:
            with self._condition:
                self._registered.add(number)
                self._condition.notify_all()

        def on_incoming(circuit: str) -> None:
            if self._splicer.circuits + len(self._incoming) >= _MOST_CIRCUITS:
                logger.warning("too many circuits: one from %s is not accepted", relay)
                return
            head = request(RelayMethod.ACCEPT, circuit, self._access.ticket)
            incoming = IncomingCircuit(self._loop, self._splicer, relay, target, head)
            self._incoming.add(incoming)
            incoming.begin(lambda: self._incoming.discard(incoming))

        def on_end(reason: str) -> None:
            nonlocal outcome
            with self._condition:
                outcome = (number in self._registered, reason)
                self._registered.discard(number)
            self._controls.pop(number, None)
            ended.set()

        control = ControlConnection(
            self._loop, connection, self._access, on_registered, on_incoming, on_end
        )

        def begin() -> None:
            self._controls[number] = control
            if self._closing.is_set():
                control.end("this node is closing")
            else:
                control.begin()

        if self._loop.call(begin):
            ended.wait()
        else:
            connection.close()
        return outcome

    def _end(self) -> None:
        for control in list(self._controls.values()):
            control.end("this node is closing")
        for incoming in list(self._incoming):
            incoming.end("this node is closing")
        self._splicer.close()
