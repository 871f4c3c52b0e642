"""Link over any stream that carries frames in order; used by both transports.

The transport owns the stream. One of its threads sends the ``batches()``, another one passes received
bytes to ``received()`` and calls ``ended()`` at the end of the stream.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from queue import SimpleQueue

from ravnest.errors import LinkClosedError, RavnestError, WireError
from ravnest.transport.base import Link, LinkDelay, LinkHandler
from ravnest.transport.delay_meter import DelayMeter
from ravnest.wire.codecs import CODECS, RAW, Codec
from ravnest.wire.control import Ack, Closing, Control, Echo, Probe, decode_control, encode_control
from ravnest.wire.envelope import Buffer, Kind, split, unseal
from ravnest.wire.frames import CHUNK_BYTES, DEFAULT_LIMITS, Assembler, encode_parts, largest_frame
from ravnest.wire.header import Limits
from ravnest.wire.messages import LOSSY, AnyHead, Goodbye, Hello, Message, RingChunk

CLOSE_SECONDS = 5.0
"""Time for the peer to receive the last messages."""
_MAX_CONTROLS = 4096
_FIRST_FLUSH = 1 << 32
"""First token of a flush; tokens of the delay meter are smaller."""


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


class _Mark(Enum):
    WAKE = 0
    """Control frames are waiting to be sent."""
    END = 1


class FrameLink:
    """Link that encodes messages as frames; implements ``base.Link``."""

    def __init__(
        self,
        local: Hello,
        peer: Hello,
        handler: LinkHandler,
        hang_up: Callable[[], None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """``hang_up`` ends the stream at once in both directions; ``ended`` must follow."""
        self.local = local
        self.peer = peer
        self.sent_bytes = 0
        self.received_bytes = 0
        self.clamped = 0
        self._codec = agreed_codec(local, peer)
        self._handler = handler
        self._hang_up = hang_up
        self._largest = largest_frame(limits)
        self._assembler = Assembler(limits)
        self._meter = DelayMeter()
        self._queue: SimpleQueue[Message | Probe | _Mark] = SimpleQueue()
        self._controls: deque[Control] = deque()
        self._ack: tuple[int, float] | None = None
        """Number of received messages to acknowledge, and the time of the last one."""
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._unwritten = 0
        """Messages that are queued or being written."""
        self._closing = False
        self._ended = False
        self._goodbye = False
        self._peer_closed = False
        self._failure: str | None = None
        self._done = threading.Event()
        self._flushes: dict[int, _Flush] = {}
        self._tokens = itertools.count(_FIRST_FLUSH)
        self._reader: int | None = None
        self._control(Probe(self._meter.start(time.perf_counter())))

    def __repr__(self) -> str:
        return f"<link of node_{self.local.node} to node_{self.peer.node}>"

    @property
    def alive(self) -> bool:
        """True until the end of the stream."""
        return not self._done.is_set()

    # Methods of base.Link

    def send(self, message: Message) -> None:
        """Queue a message."""
        with self._lock:
            if self._closing or self._ended:
                how = "closed" if self._closing else "lost"
                raise LinkClosedError(f"the link to node_{self.peer.node} is {how}")
            token = None if _unmetered(message) else self._meter.message_sent(time.perf_counter())
            self._unwritten += 1
            self._queue.put(message)
        if token is not None:
            self._control(Probe(token))

    def flush(self, timeout: float) -> bool:
        """Wait until the peer has received all queued messages."""
        assert threading.get_ident() != self._reader, "flush() must not be called in a handler"
        with self._lock:
            if self._ended:
                return False
            token = next(self._tokens)
            flush = self._flushes[token] = _Flush()
            self._queue.put(Probe(token))
        flush.event.wait(timeout)
        with self._lock:
            self._flushes.pop(token, None)
        return flush.answered

    def wait_written(self, timeout: float) -> bool:
        """Wait until all queued messages are written."""
        with self._written:
            return self._written.wait_for(lambda: self._ended or not self._unwritten, timeout)

    def close(self) -> None:
        """Flush and close."""
        with self._lock:
            first, self._closing = not self._closing, True
        if threading.get_ident() == self._reader:
            if first:  # this thread has to receive the answer that close() waits for
                threading.Thread(target=self._close, name=f"close {self!r}", daemon=True).start()
        elif first:
            self._close()
        else:
            self._done.wait(2 * CLOSE_SECONDS)

    def delay(self) -> LinkDelay:
        """Return the measured delays."""
        return self._meter.delay()

    # Called by the transport

    def introduce(self, on_link: Callable[[FrameLink], None]) -> None:
        """Pass the link to ``on_link`` before anything is received."""
        try:
            on_link(self)
        except Exception as error:
            logger.exception("node_%d failed to accept %r", self.local.node, self)
            self.fail(f"node_{self.local.node} failed to accept the link: {error!r}")

    def batches(self) -> Iterator[bytes]:
        """Yield the bytes to send: batches of whole frames, each of about one chunk.

        Blocks while the queue is empty and ends when the link closes. Frames that are already queued
        are sent in one batch, since each network message costs several thread switches; no frame waits
        for others.
        """
        batch: list[Buffer] = []
        size = 0
        for parts in self._frames():
            batch += parts
            size += sum(map(len, parts))
            if batch and (size >= CHUNK_BYTES or not parts):
                joined = b"".join(batch)
                batch.clear()
                size = 0
                self.sent_bytes += len(joined)
                yield joined
                del joined
        if batch:
            joined = b"".join(batch)
            self.sent_bytes += len(joined)
            yield joined

    def received(self, data: bytes) -> None:
        """Process a received batch."""
        self._reader = threading.get_ident()
        self.received_bytes += len(data)
        try:
            for part in split(data):
                frame = unseal(part, self._largest)
                if frame.kind is Kind.CONTROL:
                    self._answer(decode_control(frame))
                elif self._failure:
                    return
                elif (message := self._assembler.take(frame)) is not None:
                    self._deliver(message)
        except WireError as error:
            self.fail(f"node_{self.peer.node} sent an invalid frame: {error}")

    def ended(self, detail: str) -> None:
        """Process the end of the stream; the handler is notified unless the end was intended.

        ``detail`` is the network's reason, used if the peer has not closed the link itself.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._written.notify_all()
            lost = not self._closing and not self._goodbye
            for flush in self._flushes.values():
                flush.event.set()
        self._reader = threading.get_ident()
        self._queue.put(_Mark.END)
        try:
            if lost:
                self._handler.on_lost(self, self._failure or self._reason(detail))
        except Exception:
            logger.exception("the handler of %r failed to process the loss", self)
        finally:
            self._reader = None  # thread identifiers are reused
            self._done.set()

    def _reason(self, detail: str) -> str:
        name = f"node_{self.peer.node}"
        return f"{name} closed the link" if self._peer_closed else f"lost {name}: {detail}"

    def fail(self, reason: str) -> None:
        """End the link with an error on this side."""
        with self._lock:
            self._failure = self._failure or reason
        self._hang_up()

    def _frames(self) -> Iterator[list[Buffer]]:
        """Yield frames as parts; an empty list before the queue blocks."""
        while True:
            if self._queue.empty():
                yield []
            item = self._queue.get()
            if self._ended:
                return
            yield from self._control_frames()
            if item is _Mark.END:
                yield encode_control(Closing())
                return
            if isinstance(item, Probe):
                yield encode_control(item)
            elif isinstance(item, Message):
                frames = self._encode(item)
                del item  # otherwise an idle link would keep the last message's tensors alive
                try:
                    for parts in frames:
                        yield parts
                        yield from self._control_frames()
                except WireError as error:
                    self.fail(f"a message to node_{self.peer.node} cannot be sent: {error}")
                    return
                del frames, parts
                with self._written:
                    self._unwritten -= 1
                    self._written.notify_all()

    def _encode(self, message: Message) -> Iterator[list[Buffer]]:
        codec = self._codec if isinstance(message.head, LOSSY) else RAW
        return encode_parts(message, codec, clamped=self._count_clamped)

    def _count_clamped(self, values: int) -> None:
        self.clamped += values

    def _close(self) -> None:
        if self.flush(CLOSE_SECONDS):
            self._queue.put(_Mark.END)
            self._done.wait(CLOSE_SECONDS)
        if not self._done.is_set():
            self._hang_up()
            self._done.wait(CLOSE_SECONDS)

    def _deliver(self, message: Message) -> None:
        if isinstance(message.head, Goodbye):
            self._goodbye = True
        metered = not _unmetered(message)
        if metered:
            now = time.perf_counter()
            count = self._meter.message_arrived(now)
            if count is not None:
                self._ack = count, now
        try:
            self._handler.on_message(self, message)
        except Exception as error:
            logger.exception("the handler of %r failed", self)
            self.fail(f"node_{self.local.node} failed to handle a message: {error!r}")

    def _answer(self, control: Control) -> None:
        match control:
            case Probe(token):
                self._control(Echo(token))
            case Closing():
                self._peer_closed = True
            case Ack(count, held):
                self._meter.ack_arrived(count, time.perf_counter() - max(0.0, held))
            case Echo(token) if token >= _FIRST_FLUSH:
                with self._lock:
                    flush = self._flushes.get(token)
                if flush is not None:
                    flush.answered = True
                    flush.event.set()
            case Echo(token):
                following = self._meter.echo_arrived(token, time.perf_counter())
                if following is not None:
                    self._control(Probe(following))

    def _control(self, control: Control) -> None:
        if len(self._controls) >= _MAX_CONTROLS:
            raise WireError("the peer sends more probes than can be answered")
        self._controls.append(control)
        self._queue.put(_Mark.WAKE)

    def _control_frames(self) -> Iterator[list[Buffer]]:
        """Yield control frames, between frames of messages so that probes do not wait for tensors."""
        ack, self._ack = self._ack, None
        if ack is not None:  # sent only together with other frames
            count, arrived = ack
            yield encode_control(Ack(count, time.perf_counter() - arrived))
        while self._controls:
            control = self._controls.popleft()
            if isinstance(control, Probe):
                self._meter.probe_left(control.token, time.perf_counter())
            yield encode_control(control)


def _unmetered(message: Message) -> bool:
    """Return whether a message is excluded from the delay measurement.

    Ring chunks come in bursts in one direction, and their delay is not used. Acknowledging them would
    cost a message in the other direction every few milliseconds.
    """
    return isinstance(message.head, RingChunk)


class _Flush:
    """State of a ``flush`` that waits for an Echo."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.answered = False


def try_send(link: Link, head: AnyHead) -> None:
    """Send a message; ignore a closed link, whose loss the link reports itself."""
    try:
        link.send(Message(head))
    except RavnestError:
        logger.debug("the link to node_%d is already closed", link.peer.node)


def send_and_close(link: Link, last: AnyHead | None) -> None:
    """Send a last message, if there is one, and close the link."""
    if last is not None:
        try_send(link, last)
    link.close()
