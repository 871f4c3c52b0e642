"""Link over streams that carry frames in order; used by both transports.

A link outlives its connections (``session.py``). Messages have numbers, in both directions, and are kept
until the peer has acknowledged them; what a lost connection did not deliver is sent again on the next.

The transport owns the streams. For each connection, one of its threads sends the ``batches()``, another
one passes received bytes to ``received()`` and calls ``disconnected()`` at the end of the stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from ravnest.deadlines import LINK_CLOSE, LINK_HEARTBEAT
from ravnest.errors import LinkClosedError, WireError
from ravnest.tracing.recorder import SpanRecorder
from ravnest.transport.base import LinkDelay, LinkHandler
from ravnest.transport.connection import Connection
from ravnest.transport.link_trace import LinkTrace
from ravnest.transport.routes import RouteKind
from ravnest.transport.session import LinkSession
from ravnest.wire.codecs import CODECS, RAW, Codec
from ravnest.wire.control import (
    Ack,
    Closing,
    Control,
    Echo,
    Position,
    Probe,
    Resume,
    Resumed,
    decode_control,
    encode_control,
)
from ravnest.wire.envelope import Buffer, Frame, Kind, split, unseal
from ravnest.wire.frames import CHUNK_BYTES, DEFAULT_LIMITS, encode_parts, largest_frame
from ravnest.wire.header import Limits
from ravnest.wire.messages import LOSSY, Goodbye, Hello, Message, RingChunk, StateBlock

_FAREWELL_SECONDS = 1.0
"""Time to send the last frame of a link that has failed."""
_FLUSH_TOKEN = 0
"""Token of a probe that only asks for an acknowledgement; those of the delay meter are larger."""


def largest_batch(limits: Limits) -> int:
    """Return the maximum number of bytes that a link sends or receives at once."""
    return CHUNK_BYTES + largest_frame(limits)


logger = logging.getLogger(__name__)


def agreed_codec(local: Hello, peer: Hello) -> Codec:
    """Return the codec if both ends prefer the same one; otherwise log a warning and return raw."""
    if local.codec == peer.codec and local.codec in CODECS:
        return CODECS[local.codec]
    logger.warning(
        "node_%d prefers codec %.20s and node_%d %.20s: tensors between them are sent uncompressed",
        local.node,
        local.codec,
        peer.node,
        peer.codec,
    )
    return RAW


class FrameLink:
    """Link that encodes messages as frames; implements ``base.Link``."""

    def __init__(
        self,
        local: Hello,
        peer: Hello,
        handler: LinkHandler,
        *,
        session: str,
        leads: bool,
        on_down: Callable[[FrameLink, str], None],
        on_end: Callable[[FrameLink], None],
        limits: Limits = DEFAULT_LIMITS,
        trace: SpanRecorder | None = None,
    ) -> None:
        """``leads``: this side opened the link and chooses the connection that is used.

        ``on_down`` is called with the reason when there is no connection any more, ``on_end`` when the
        link is over. ``trace`` records its messages.
        """
        self.local = local
        self.peer = peer
        self.session = session
        self.sent_bytes = 0
        self.received_bytes = 0
        self.clamped = 0
        self._trace = None if trace is None else LinkTrace(trace, peer.node, session)
        self._codec = agreed_codec(local, peer)
        self._handler = handler
        self._on_down = on_down
        self._on_end = on_end
        self._largest = largest_frame(limits)
        self._inbound = threading.Lock()
        """Held while received bytes are processed: two connections may overlap."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._state = LinkSession(leads=leads, limits=limits)
        self._encoded = 0
        """Messages that were encoded at least once."""
        self._flush_target = 0
        """Messages of which a ``flush`` awaits the acknowledgement."""
        self._sent_at = 0.0
        self._closing = False
        self._ended = False
        self._goodbye = False
        self._peer_closed = False
        self._failure: str | None = None
        self._done = threading.Event()
        self._handling: set[int] = set()
        """Threads that run the handler."""

    def __repr__(self) -> str:
        return f"<link of node_{self.local.node} to node_{self.peer.node}>"

    @property
    def alive(self) -> bool:
        """True until the end of the link."""
        return not self._done.is_set()

    @property
    def leads(self) -> bool:
        """True if this side opened the link."""
        return self._state.leads

    @property
    def connected(self) -> bool:
        """True if there is a connection on which messages can be sent."""
        return self._state.connected

    @property
    def route(self) -> RouteKind:
        """Kind of the route of the current connection."""
        current = self._state.current
        return "relayed" if current is not None and current.relayed else "direct"

    # Methods of base.Link

    def send(self, message: Message) -> None:
        """Queue a message."""
        now = time.perf_counter()
        with self._lock:
            if self._closing or self._ended:
                how = "closed" if self._closing else "lost"
                raise LinkClosedError(f"the link to node_{self.peer.node} is {how}")
            number = self._state.outbox.put(message)
            current = self._state.current
            if not _unmetered(message):
                token = self._state.meter.message_sent(number, now)
                if token is not None and current is not None:
                    current.controls.append(Probe(token))
        if current is not None:
            current.prompt()

    def flush(self, timeout: float) -> bool:
        """Wait until the peer has received all queued messages."""
        assert threading.get_ident() not in self._handling, "flush() must not be called in a handler"
        with self._changed:
            target = self._state.outbox.queued
            self._flush_target = max(self._flush_target, target)
            if self._state.current is not None and not self._state.outbox.unsent:
                self._state.control(self._state.current, Probe(_FLUSH_TOKEN))
            self._changed.wait_for(
                lambda: self._ended or self._state.outbox.acknowledged >= target, timeout
            )
            return not self._ended and self._state.outbox.acknowledged >= target

    def wait_written(self, timeout: float) -> bool:
        """Wait until all queued messages are written."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._ended or not (self._state.outbox.unsent or self._state.writing), timeout
            )

    def close(self) -> None:
        """Flush and close."""
        with self._lock:
            first, self._closing = not self._closing, True
        if threading.get_ident() in self._handling:
            if first:  # this thread has to receive the answer that close() waits for
                threading.Thread(target=self._close, name=f"close {self!r}", daemon=True).start()
        elif first:
            self._close()
        else:
            self._done.wait(2 * LINK_CLOSE)

    def delay(self) -> LinkDelay:
        """Return the measured delays."""
        return self._state.meter.delay()

    # Called by the transport

    def introduce(self, on_link: Callable[[FrameLink], None]) -> None:
        """Pass the link to ``on_link`` before anything is received."""
        try:
            on_link(self)
        except Exception as error:
            logger.exception("node_%d failed to accept %r", self.local.node, self)
            self.fail(f"node_{self.local.node} failed to accept the link: {error!r}")

    def attach(self, connection: Connection) -> None:
        """Add a connection to the peer, after the Hellos; the side that leads uses it from now on."""
        with self._inbound, self._lock:
            if self._ended:
                connection.hang_up()
            else:
                self._state.attach(connection)

    def batches(self, connection: Connection) -> Iterator[bytes]:
        """Yield the bytes to send on a connection: batches of whole frames.

        Blocks while there is nothing to send, and ends with the connection. Frames that are already
        queued are sent in one batch, since each network message costs several thread switches; no frame
        waits for others.
        """
        while True:
            batch = self.next_batch(connection)
            if batch is not None:
                begin = time.perf_counter()
                yield batch
                self.written(len(batch), time.perf_counter() - begin)
                del batch  # an idle link keeps nothing of what it has sent
            elif self.writes_end(connection):
                yield b"".join(encode_control(Closing()))
                return
            elif self.stale(connection):
                return
            else:
                connection.await_wake()

    def next_batch(self, connection: Connection) -> bytes | None:
        """Return the next bytes to send on a connection, of about one chunk; None if there are none."""
        try:
            parts = self.next_parts(connection)
        except WireError as error:
            self.unsendable(error)
            return None
        return None if parts is None else b"".join(parts)

    def next_parts(self, connection: Connection) -> list[Buffer] | None:
        """Return the next bytes to send like ``next_batch``, as parts that share memory of tensors.

        ``WireError`` if a message cannot be sent; the caller then calls ``unsendable``, in a thread that
        may run the handler.
        """
        batch: list[Buffer] = []
        size = 0
        while size < self._state.chunks.bytes:
            parts = self._next_frame(connection)
            if parts is None:
                break
            batch += parts
            size += sum(map(len, parts))
        ack = self._due_ack(connection, alone=not batch)
        if ack is not None:
            batch = [*encode_control(ack), *batch]
        if not batch:
            return None
        self.sent_bytes += sum(map(len, batch))
        self._sent_at = time.monotonic()
        return batch

    def written(self, count: int, seconds: float) -> None:
        """Record that the network took a batch of ``count`` bytes in this time."""
        self._state.chunks.sent(count, seconds)
        if self._trace is not None:
            self._trace.written()

    def unsendable(self, error: WireError) -> None:
        """End the link: a message cannot be sent."""
        self.fail(f"a message to node_{self.peer.node} cannot be sent: {error}")

    def invalid(self, error: WireError) -> None:
        """End the link: the peer does not follow the protocol."""
        self.fail(f"node_{self.peer.node} sent an invalid frame: {error}")

    def received(self, connection: Connection, data: Buffer) -> None:
        """Process a received batch."""
        with self._inbound:
            if self.stale(connection):
                return
            with self._lock:  # the heartbeat reads the detector
                self._state.detector.arrived(time.monotonic())
            self.received_bytes += len(data)
            try:
                for part in split(data):
                    frame = unseal(part, self._largest)
                    if frame.kind is Kind.CONTROL:
                        self._answer(connection, decode_control(frame))
                    elif not connection.resumed:
                        raise WireError("a message arrived before the connection was chosen")
                    elif (message := self._assembled(frame)) is not None:
                        self._deliver(message)
                    if self.stale(connection):
                        return
            except WireError as error:
                self.invalid(error)
                return
            with self._lock:
                wake = self._state.acks.bytes_arrived(len(data))
        if wake:
            connection.prompt()

    def _assembled(self, frame: Frame) -> Message | None:
        """Add a frame to the message that arrives; return the message if it is complete."""
        assembler, trace = self._state.assembler, self._trace
        if trace is not None:
            trace.arrived(len(frame.body), opens=frame.kind is Kind.OPENING)
        message = assembler.take(frame)
        if trace is not None and message is not None:
            trace.received(message.head, assembler.messages - 1)
        return message

    def disconnected(self, connection: Connection, detail: str) -> None:
        """Process the end of a connection; ``detail`` is the network's reason."""
        with self._lock:
            down = self._state.detach(connection)
            if self._ended or not down:
                return
            final = self._closing or self._goodbye or self._peer_closed
            self._changed.notify_all()
        if final:
            self._finish(self._reason(detail))
        else:
            self._on_down(self, detail)

    def tick(self, now: float) -> None:
        """Send a heartbeat if one is due, and give up a connection that seems dead."""
        with self._lock:
            current = self._state.current
            if current is None:
                return
            if self._inbound.locked():  # the handler is busy, so that nothing can arrive
                self._state.detector.restarted()
            dead = self._state.detector.suspects(now)
            if not dead and current.resumed and now - self._sent_at >= LINK_HEARTBEAT:
                self._state.probe(current)
        if dead:
            current.hang_up()
            self.disconnected(current, "nothing arrives any more")

    def await_connection(self, timeout: float) -> bool:
        """Wait until there is a connection or the link is over; return False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self.connected, timeout)

    def abandon(self, detail: str) -> None:
        """End the link: there will be no other connection."""
        self._finish(self._reason(detail))

    def fail(self, reason: str) -> None:
        """End the link with an error on this side."""
        with self._lock:
            self._failure = self._failure or reason
        self._finish(reason)

    def _reason(self, detail: str) -> str:
        name = f"node_{self.peer.node}"
        return f"{name} closed the link" if self._peer_closed else f"lost {name}: {detail}"

    def _finish(self, reason: str) -> None:
        """End the link; the handler is notified unless the end was intended."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            lost = not self._closing and not self._goodbye
            self._state.current = None
            connections = list(self._state.open)
            self._state.outbox.clear()
            self._changed.notify_all()
        for connection in connections:
            self._leave(connection)
        self._on_end(self)
        try:
            if lost:
                self._call_handler(lambda: self._handler.on_lost(self, self._failure or reason))
        except Exception:
            logger.exception("the handler of %r failed to process the loss", self)
        finally:
            self._done.set()

    def _leave(self, connection: Connection) -> None:
        """End a connection of a link that is over; after a failure, tell the peer not to dial again."""
        connection.over = True
        if self._failure and connection.resumed:
            connection.last = True
            timer = threading.Timer(_FAREWELL_SECONDS, connection.hang_up)
            timer.daemon = True
            timer.start()
        else:
            connection.hang_up()
        connection.wake.put(None)

    def stale(self, connection: Connection) -> bool:
        """Return whether the connection, or the link, is over."""
        return connection.over or self._ended

    # Sending

    def _next_frame(self, connection: Connection) -> list[Buffer] | None:
        """Return a control frame, or else the next frame of a message."""
        while True:
            with self._lock:
                if self.stale(connection):
                    return None
                if connection.controls:
                    control = connection.controls.popleft()
                    if isinstance(control, Probe) and control.token != _FLUSH_TOKEN:
                        self._state.meter.probe_left(control.token, time.perf_counter())
                    return encode_control(control)
                if connection is not self._state.current or not connection.resumed:
                    return None
                taken = self._state.outbox.take() if connection.frames is None else None
                if taken is None and connection.frames is None:
                    return None
                self._state.writing = True
            if taken is not None:
                connection.frames = self._encode(*taken)
                del taken  # otherwise the message would be kept alive after its acknowledgement
            assert connection.frames is not None
            parts = next(connection.frames, None)
            if parts is not None:
                return parts
            connection.frames = None
            self._after_message(connection)

    def _after_message(self, connection: Connection) -> None:
        """Ask for an acknowledgement if a ``flush`` waits for the last message."""
        with self._lock:
            if connection is not self._state.current:
                return
            self._state.writing = False
            self._changed.notify_all()
            waiting = self._flush_target > self._state.outbox.acknowledged
            if waiting and not self._state.outbox.unsent:
                self._state.control(connection, Probe(_FLUSH_TOKEN))

    def _encode(self, message: Message, place: Position) -> Iterator[list[Buffer]]:
        codec = self._codec if isinstance(message.head, LOSSY) else RAW
        again = place.messages < self._encoded
        self._encoded = max(self._encoded, place.messages + 1)
        count = None if again else self._count_clamped
        size = self._state.chunks
        frames = encode_parts(message, codec, lambda: size.bytes, clamped=count, place=place)
        trace = self._trace
        return frames if trace is None else trace.encoding(frames, message.head, place.messages)

    def _count_clamped(self, values: int) -> None:
        self.clamped += values

    def _due_ack(self, connection: Connection, *, alone: bool) -> Ack | None:
        """Return an acknowledgement if one is due; ``alone``: nothing else is sent now."""
        with self._lock:
            if not connection.resumed or connection is not self._state.current:
                return None
            return self._state.acks.due(time.perf_counter(), alone=alone)

    def writes_end(self, connection: Connection) -> bool:
        """Return whether the peer is to be told now that the link is over."""
        with self._lock:
            done = self._closing and self._state.outbox.acknowledged == self._state.outbox.queued
            current = connection is self._state.current and connection.resumed
            return connection.last or (done and current)

    def _close(self) -> None:
        if self.flush(LINK_CLOSE):
            if self._state.open:  # a connection may be about to be chosen
                self.await_connection(LINK_CLOSE)
            with self._lock:
                current = self._state.current
            if current is not None:
                current.wake.put(None)
                self._done.wait(LINK_CLOSE)
        self._finish("this node has closed the link")

    # Receiving

    def _deliver(self, message: Message) -> None:
        if isinstance(message.head, Goodbye):
            self._goodbye = True
        now = time.perf_counter()
        try:
            self._call_handler(lambda: self._handler.on_message(self, message))
        except Exception as error:
            logger.exception("the handler of %r failed", self)
            self.fail(f"node_{self.local.node} failed to handle a message: {error!r}")
        with self._lock:
            self._state.acks.message_arrived(now)

    def _call_handler(self, call: Callable[[], None]) -> None:
        thread = threading.get_ident()
        self._handling.add(thread)
        try:
            call()
        finally:
            self._handling.discard(thread)

    def _answer(self, connection: Connection, control: Control) -> None:
        match control:
            case Probe(token):
                self._answer_probe(connection, token)
            case Closing():
                self._peer_closed = True
            case Ack(count, held):
                self._acknowledged(count, time.perf_counter() - max(0.0, held))
            case Echo(token):
                following = self._state.meter.echo_arrived(token, time.perf_counter())
                if following is not None:
                    with self._lock:
                        self._state.control(connection, Probe(following))
            case Resume() | Resumed():
                self._choose(connection, control)

    def _choose(self, connection: Connection, control: Resume | Resumed) -> None:
        with self._lock:
            if isinstance(control, Resume):
                self._state.resume(connection, control)
            else:
                self._state.resumed(connection, control)
            self._changed.notify_all()

    def _answer_probe(self, connection: Connection, token: int) -> None:
        with self._lock:
            ack = self._state.acks.requested(time.perf_counter())
            if ack is not None:
                self._state.control(connection, ack)
            self._state.control(connection, Echo(token))

    def _acknowledged(self, count: int, now: float) -> None:
        with self._lock:
            if count > self._state.outbox.acknowledged:
                self._state.outbox.acknowledge(count)
                self._changed.notify_all()
        self._state.meter.ack_arrived(count, now)


def _unmetered(message: Message) -> bool:
    """Return whether a message is excluded from the delay measurement.

    Ring chunks and replicas come in bursts in one direction, and their delay is not used.
    """
    return isinstance(message.head, RingChunk | StateBlock)
