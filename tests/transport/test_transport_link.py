"""FrameLink without a network: sent batches and received frames."""

import itertools
import math
import threading

import pytest
import torch
from transport_nodes import SECONDS, Inbox, hello

from ravnest.errors import LinkClosedError
from ravnest.transport.link import FrameLink
from ravnest.types import MicrobatchId
from ravnest.wire.control import Closing, Echo, Probe, decode_control, encode_control
from ravnest.wire.envelope import Kind, split, unseal
from ravnest.wire.frames import CHUNK_BYTES, Assembler, encode
from ravnest.wire.messages import Forward, Message


class Bench:
    """Link whose stream is replaced by events."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.hung_up = threading.Event()
        self.link = FrameLink(hello(0), hello(1), self.inbox, self.hung_up.set)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def message(index: int, count: int = 10) -> Message:
    return Message(Forward("run", MicrobatchId(0, index), 1), {"x": torch.zeros(count)})


def frame(index: int) -> bytes:
    return b"".join(encode(message(index)))


def control(*controls: Probe | Echo | Closing) -> bytes:
    return b"".join(part for each in controls for part in map(bytes, encode_control(each)))


def kinds(batch: bytes) -> list[Kind]:
    return [unseal(part, len(batch)).kind for part in split(batch)]


def test_queued_messages_form_one_batch_and_probes_go_first(bench: Bench) -> None:
    for index in range(10):
        bench.link.send(message(index))
    batch = next(bench.link.batches())
    assert kinds(batch) == [Kind.CONTROL] + 10 * [Kind.OPENING]
    assert bench.link.sent_bytes == len(batch)


def test_batches_have_about_the_size_of_a_chunk(bench: Bench) -> None:
    count = 4 * math.ceil(CHUNK_BYTES / 240_000)
    for index in range(count):
        bench.link.send(message(index, 60_000))
    batches = list(itertools.islice(bench.link.batches(), 4))
    assert all(CHUNK_BYTES <= len(batch) < 1.5 * CHUNK_BYTES for batch in batches)
    assembler = Assembler()
    frames = [unseal(part, len(batch)) for batch in batches for part in split(batch)]
    messages = [assembler.take(each) for each in frames if each.kind is not Kind.CONTROL]
    assert [m.head.microbatch.index for m in messages if m and isinstance(m.head, Forward)] == list(
        range(count)
    )


def test_control_frames_overtake_large_messages(bench: Bench) -> None:
    bench.link.send(message(0, CHUNK_BYTES))
    batches = bench.link.batches()
    next(batches)
    bench.link.received(control(Probe(7)))
    controls = [unseal(part, 2 * CHUNK_BYTES) for part in split(next(batches))]
    assert [decode_control(each) for each in controls if each.kind is Kind.CONTROL] == [Echo(7)]


def test_a_blocked_writer_ends_with_the_link(bench: Bench) -> None:
    done = threading.Event()

    def write() -> None:
        for _ in bench.link.batches():
            pass
        done.set()

    threading.Thread(target=write, daemon=True).start()
    bench.link.ended("gone")
    assert done.wait(SECONDS)
    assert bench.inbox.loss() == "lost node_1: gone"
    with pytest.raises(LinkClosedError):
        bench.link.send(message(0))


def test_a_lost_link_sends_nothing_more(bench: Bench) -> None:
    bench.link.send(message(0))
    bench.link.ended("gone")
    assert list(bench.link.batches()) == []


def test_a_loss_is_reported_once(bench: Bench) -> None:
    bench.link.ended("gone")
    bench.link.ended("gone again")
    assert bench.inbox.lost.qsize() == 1


def test_a_closing_frame_means_that_the_peer_closed(bench: Bench) -> None:
    bench.link.received(control(Closing()))
    bench.link.ended("whatever")
    assert bench.inbox.loss() == "node_1 closed the link"


def test_frames_before_a_damaged_one_are_delivered_and_none_after(bench: Bench) -> None:
    damaged = bytearray(frame(1))
    damaged[-1] ^= 1
    bench.link.received(frame(0) + bytes(damaged) + frame(2))
    assert bench.hung_up.is_set()
    bench.link.received(frame(3))
    bench.link.ended("cancelled")
    assert "checksum" in bench.inbox.loss()
    assert bench.inbox.messages.qsize() == 1


def test_too_many_probes_lose_the_link(bench: Bench) -> None:
    bench.link.received(control(*map(Probe, range(10_000))))
    assert bench.hung_up.is_set()
    bench.link.ended("cancelled")
    assert "more probes than can be answered" in bench.inbox.loss()


def test_unexpected_echoes_are_ignored(bench: Bench) -> None:
    bench.link.received(control(Echo(3), Echo(2**40), Echo(-1)))
    assert not bench.hung_up.is_set()
    assert bench.link.delay().round_trip == 0.0


def test_flush_in_a_handler_is_an_assertion_error(bench: Bench) -> None:
    failed: list[bool] = []

    def flush(link: object, message: Message) -> None:
        with pytest.raises(AssertionError, match="must not be called in a handler"):
            bench.link.flush(1)
        failed.append(True)

    bench.inbox.reply = flush
    bench.link.received(frame(0))
    assert failed
