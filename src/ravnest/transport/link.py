"""A link over anything that carries frames in order: what both transports have in common.

The transport owns the pipe. One of its threads takes ``batches()`` and sends them, one feeds what
arrives to ``received()`` and calls ``ended()`` when nothing more can come.
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
"""A peer that takes longer to get the last messages is given up."""
_MOST_CONTROLS = 4096
_FIRST_FLUSH = 1 << 32
"""Tokens of flushes; those of the meter are smaller."""


def largest_batch(limits: Limits) -> int:
    """Bytes that a link sends or takes at once, at most."""
    return CHUNK_BYTES + largest_frame(limits)


_log = logging.getLogger(__name__)


def agreed_codec(local: Hello, peer: Hello) -> Codec:
    """What both ends asked for if that is the same, else raw, and said so."""
    if local.codec == peer.codec and local.codec in CODECS:
        return CODECS[local.codec]
    _log.warning(
        "node_%d asks for %.20s and node_%d for %.20s: between them tensors travel as they are",
        local.node,
        local.codec,
        peer.node,
        peer.codec,
    )
    return RAW


class _Mark(Enum):
    WAKE = 0
    """There are control frames to send."""
    END = 1


class FrameLink:
    """Implements ``base.Link``; see there for the contract."""

    def __init__(
        self,
        local: Hello,
        peer: Hello,
        handler: LinkHandler,
        hang_up: Callable[[], None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """``hang_up`` ends the pipe at once, in both directions; ``ended`` must follow."""
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
        """Messages that have arrived, and when the last of them did; to be told."""
        self._lock = threading.Lock()
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
        """Whether anything can still arrive."""
        return not self._done.is_set()

    # The contract of a link.

    def send(self, message: Message) -> None:
        """Queue a message."""
        with self._lock:
            if self._closing or self._ended:
                how = "closed" if self._closing else "lost"
                raise LinkClosedError(f"the link to node_{self.peer.node} is {how}")
            token = None if _unmetered(message) else self._meter.message_sent(time.perf_counter())
            self._queue.put(message)
        if token is not None:
            self._control(Probe(token))

    def flush(self, timeout: float) -> bool:
        """Wait until the peer has got what is queued."""
        assert threading.get_ident() != self._reader, "flush() in a handler would wait for itself"
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

    def close(self) -> None:
        """Flush and close."""
        with self._lock:
            first, self._closing = not self._closing, True
        if threading.get_ident() == self._reader:
            if first:  # this thread would have to receive the answer that close() waits for
                threading.Thread(target=self._close, name=f"close {self!r}", daemon=True).start()
        elif first:
            self._close()
        else:
            self._done.wait(2 * CLOSE_SECONDS)

    def delay(self) -> LinkDelay:
        """What the link costs."""
        return self._meter.delay()

    # For the owner of the pipe.

    def introduce(self, on_link: Callable[[FrameLink], None]) -> None:
        """Show the link to those who serve, before anything is received."""
        try:
            on_link(self)
        except Exception as error:
            _log.exception("node_%d does not know what to do with %r", self.local.node, self)
            self.fail(f"node_{self.local.node} failed to take the link: {error!r}")

    def batches(self) -> Iterator[bytes]:
        """What is to be sent, in order: runs of whole frames, of about a chunk each.

        Blocks while there is nothing, ends when the link closes. Whatever is queued already travels
        together, as each message of the network costs several changes of thread; nothing waits for
        company.
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
        """A batch has arrived."""
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
            self.fail(f"node_{self.peer.node} sent something unreadable: {error}")

    def ended(self, detail: str) -> None:
        """Nothing more can arrive; the handler hears of it unless the link was meant to end.

        ``detail`` is what the network says; it is of interest if the peer did not.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            lost = not self._closing and not self._goodbye
            for flush in self._flushes.values():
                flush.event.set()
        self._reader = threading.get_ident()
        self._queue.put(_Mark.END)
        try:
            if lost:
                self._handler.on_lost(self, self._failure or self._reason(detail))
        except Exception:
            _log.exception("the handler of %r failed when it was lost", self)
        finally:
            self._reader = None  # identifiers of threads are used again
            self._done.set()

    def _reason(self, detail: str) -> str:
        name = f"node_{self.peer.node}"
        return f"{name} closed the link" if self._peer_closed else f"lost {name}: {detail}"

    def fail(self, reason: str) -> None:
        """Lose the link, for a reason on this side."""
        with self._lock:
            self._failure = self._failure or reason
        self._hang_up()

    def _frames(self) -> Iterator[list[Buffer]]:
        """Frames in parts; an empty one before it blocks."""
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
                del item  # or an idle link would keep the tensors of its last message alive
                try:
                    for parts in frames:
                        yield parts
                        yield from self._control_frames()
                except WireError as error:
                    self.fail(f"a message to node_{self.peer.node} cannot be sent: {error}")
                    return
                del frames, parts

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
            _log.exception("the handler of %r failed", self)
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
        if len(self._controls) >= _MOST_CONTROLS:
            raise WireError("more probes than can be answered")
        self._controls.append(control)
        self._queue.put(_Mark.WAKE)

    def _control_frames(self) -> Iterator[list[Buffer]]:
        """Between any two frames of messages: a probe behind a large tensor would measure that."""
        ack, self._ack = self._ack, None
        if ack is not None:  # not worth a message of its own
            count, arrived = ack
            yield encode_control(Ack(count, time.perf_counter() - arrived))
        while self._controls:
            control = self._controls.popleft()
            if isinstance(control, Probe):
                self._meter.probe_left(control.token, time.perf_counter())
            yield encode_control(control)


def _unmetered(message: Message) -> bool:
    """Pieces of a round come in bursts for one direction, and nobody plans with their delay.

    Acknowledging them would cost a message the other way every few milliseconds.
    """
    return isinstance(message.head, RingChunk)


class _Flush:
    """Someone waits for an Echo."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.answered = False


logger = logging.getLogger(__name__)


def try_send(link: Link, head: AnyHead) -> None:
    """Send; whoever is gone misses nothing, and the loss is told by the link itself."""
    try:
        link.send(Message(head))
    except RavnestError:
        logger.debug("node_%d is gone already", link.peer.node)


def part(link: Link, last: AnyHead | None) -> None:
    """Close a link, with a last word if there is one."""
    if last is not None:
        try_send(link, last)
    link.close()
