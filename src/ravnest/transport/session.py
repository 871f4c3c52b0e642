"""State of a link that outlives its connections: which one is used, and what was sent and received.

Either side may dial. The side that opened the link chooses the connection (``Resume``), and the other
side confirms it (``Resumed``); both tell what they have received, and the other continues from there. A
choice has a number that grows, so that both use the same connection if both have dialled.

There are no threads here: the link's locks guard everything.
"""

from __future__ import annotations

import time

from ravnest.errors import WireError
from ravnest.transport.acknowledgements import Acknowledgements
from ravnest.transport.chunk_size import ChunkSize
from ravnest.transport.connection import Connection
from ravnest.transport.delay_meter import DelayMeter
from ravnest.transport.failure_detector import FailureDetector
from ravnest.transport.outbox import Outbox
from ravnest.wire.control import Control, Position, Probe, Resume, Resumed
from ravnest.wire.frames import Assembler
from ravnest.wire.header import Limits

_MAX_CONTROLS = 4096


class LinkSession:
    """Connections of a link, and what they share."""

    def __init__(self, *, leads: bool, limits: Limits) -> None:
        """``leads``: this side opened the link and chooses the connection that is used."""
        self.leads = leads
        self.outbox = Outbox()
        self.acks = Acknowledgements()
        self.assembler = Assembler(limits)
        self.meter = DelayMeter()
        self.detector = FailureDetector()
        self.chunks = ChunkSize()
        self.open: set[Connection] = set()
        """Connections that have not ended."""
        self.current: Connection | None = None
        self.connections = 0
        """Connections that were used so far."""
        self.writing = False
        """A message has been written in part."""
        self._epoch = 0
        """Number of the current connection, counted by the side that leads."""

    @property
    def connected(self) -> bool:
        """True if there is a connection on which messages can be sent."""
        return self.current is not None and self.current.resumed

    def attach(self, connection: Connection) -> None:
        """Add a connection, after the Hellos; the side that leads uses it from now on."""
        self.open.add(connection)
        if self.leads:
            self._epoch += 1
            self._use(connection)
            self.control(connection, Resume(self._epoch, self._position()))

    def detach(self, connection: Connection) -> bool:
        """Remove a connection that has ended; return True if there is no other one."""
        self.open.discard(connection)
        replaced = connection.over and connection is not self.current
        connection.over = True
        connection.wake.put(None)
        if connection is self.current:
            self.current = None
            self.chunks.disconnected()
        return self.current is None and not replaced

    def resume(self, connection: Connection, head: Resume) -> None:
        """Use the connection that the other side has chosen."""
        if self.leads:
            raise WireError("the other side chooses connections")
        if head.epoch <= self._epoch:
            connection.over = True
            connection.hang_up()
            return
        self._epoch = head.epoch
        self._use(connection)
        self.control(connection, Resumed(head.epoch, self._position()))
        self._continue(connection, head.position)

    def resumed(self, connection: Connection, head: Resumed) -> None:
        """Continue on the connection that this side has chosen."""
        if not self.leads or connection.resumed:
            raise WireError("the answer to a choice of a connection arrived without a choice")
        if connection is self.current and head.epoch == self._epoch:
            self._continue(connection, head.position)

    def control(self, connection: Connection, control: Control) -> None:
        """Queue a control frame."""
        if len(connection.controls) >= _MAX_CONTROLS:
            raise WireError("the peer sends more probes than can be answered")
        connection.controls.append(control)
        connection.wake.put(None)

    def probe(self, connection: Connection) -> None:
        """Queue a probe whose answer is timed."""
        self.control(connection, Probe(self.meter.probe(time.perf_counter())))

    def _use(self, connection: Connection) -> None:
        old, self.current = self.current, connection
        if old is not None and old is not connection:
            old.over = True
            old.hang_up()
            old.wake.put(None)
        self.connections += 1
        self.detector.restarted()
        self.meter.reconnected()

    def _position(self) -> Position:
        return Position(self.assembler.messages, *self.assembler.partial)

    def _continue(self, connection: Connection, position: Position) -> None:
        """Send messages on a connection from the peer's position on."""
        self.outbox.resume(position)
        self.writing = False
        self.acks.resumed()
        connection.resumed = True
        self.probe(connection)
