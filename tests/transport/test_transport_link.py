"""FrameLink without a network: sent batches and received frames."""

import itertools
import threading

import pytest
import torch
from transport_nodes import SECONDS, Inbox, hello

from ravnest.errors import LinkClosedError
from ravnest.transport.acknowledgements import ACK_BYTES
from ravnest.transport.chunk_size import SMALLEST_BYTES
from ravnest.transport.connection import Connection
from ravnest.transport.link import FrameLink
from ravnest.types import MicrobatchId
from ravnest.wire.control import (
    START,
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
from ravnest.wire.envelope import Kind, split, unseal
from ravnest.wire.frames import CHUNK_BYTES, Assembler, encode
from ravnest.wire.messages import Forward, Message


class Bench:
    """Link whose streams are replaced by events; the test plays the peer, which opened the link."""

    def __init__(self, *, leads: bool = False) -> None:
        self.inbox = Inbox()
        self.down: list[str] = []
        self.ended = threading.Event()
        self.link = FrameLink(
            hello(0),
            hello(1),
            self.inbox,
            session="s",
            leads=leads,
            on_down=lambda link, detail: self.down.append(detail),
            on_end=lambda link: self.ended.set(),
        )
        self.epochs = itertools.count(1)
        self.hung_up = threading.Event()

    def connect(self, position: Position = START) -> Connection:
        self.hung_up = threading.Event()
        connection = Connection(self.hung_up.set)
        self.link.attach(connection)
        self.link.received(connection, control(Resume(next(self.epochs), position)))
        return connection


@pytest.fixture
def bench() -> Bench:
    return Bench()


def message(index: int, count: int = 10) -> Message:
    return Message(Forward("run", MicrobatchId(0, index), 1), {"x": torch.zeros(count)})


def frame(index: int) -> bytes:
    return b"".join(encode(message(index), number=index))


def control(*controls: Control) -> bytes:
    return b"".join(part for each in controls for part in map(bytes, encode_control(each)))


def controls(batch: bytes | None) -> list[Control]:
    frames = [unseal(part, 1 << 30) for part in split(batch or b"")]
    return [decode_control(each) for each in frames if each.kind is Kind.CONTROL]


def messages(*batches: bytes) -> list[int]:
    """Return the indices of the messages in batches."""
    assembler = Assembler()
    frames = [unseal(part, 1 << 30) for batch in batches for part in split(batch)]
    found = [assembler.take(each) for each in frames if each.kind is not Kind.CONTROL]
    return [m.head.microbatch.index for m in found if m and isinstance(m.head, Forward)]


def all_batches(link: FrameLink, connection: Connection) -> list[bytes]:
    return list(iter(lambda: link.next_batch(connection), None))


def test_queued_messages_form_one_batch_and_controls_go_first(bench: Bench) -> None:
    for index in range(10):
        bench.link.send(message(index))
    batch = bench.link.next_batch(bench.connect())
    assert batch is not None
    assert [type(each) for each in controls(batch)] == [Resumed, Probe]
    assert messages(batch) == list(range(10))
    assert bench.link.sent_bytes == len(batch)


def test_nothing_is_sent_before_the_connection_is_chosen(bench: Bench) -> None:
    bench.link.send(message(0))
    connection = Connection(lambda: None)
    bench.link.attach(connection)
    assert bench.link.next_batch(connection) is None


def test_the_side_that_leads_awaits_the_answer_to_its_choice() -> None:
    bench = Bench(leads=True)
    bench.link.send(message(0))
    connection = Connection(lambda: None)
    bench.link.attach(connection)
    assert controls(bench.link.next_batch(connection)) == [Resume(1, START)]
    assert bench.link.next_batch(connection) is None
    bench.link.received(connection, control(Resumed(1, START)))
    assert messages(bench.link.next_batch(connection) or b"") == [0]


def test_batches_grow_with_the_rate_of_the_network(bench: Bench) -> None:
    connection = bench.connect()
    for index in range(400):
        bench.link.send(message(index, 60_000))
    batches = list(itertools.islice(bench.link.batches(connection), 30))
    assert len(batches[0]) < len(batches[-1])
    assert CHUNK_BYTES <= len(batches[-1]) < 1.5 * CHUNK_BYTES
    sent = messages(*batches)
    assert sent == list(range(len(sent)))


def test_control_frames_overtake_large_messages(bench: Bench) -> None:
    connection = bench.connect()
    bench.link.send(message(0, CHUNK_BYTES))
    bench.link.next_batch(connection)
    bench.link.received(connection, control(Probe(7)))
    assert controls(bench.link.next_batch(connection)) == [Echo(7)]


def test_a_blocked_writer_ends_with_its_connection(bench: Bench) -> None:
    done = threading.Event()
    connection = bench.connect()

    def write() -> None:
        for _ in bench.link.batches(connection):
            pass
        done.set()

    threading.Thread(target=write, daemon=True).start()
    bench.link.disconnected(connection, "gone")
    assert done.wait(SECONDS)
    assert bench.down == ["gone"]
    assert bench.inbox.lost.empty()


def test_an_abandoned_link_is_lost(bench: Bench) -> None:
    connection = bench.connect()
    bench.link.disconnected(connection, "gone")
    bench.link.abandon("gone for good")
    assert bench.inbox.loss() == "lost node_1: gone for good"
    assert bench.ended.is_set()
    with pytest.raises(LinkClosedError):
        bench.link.send(message(0))


def test_a_lost_link_sends_nothing_more(bench: Bench) -> None:
    connection = bench.connect()
    bench.link.send(message(0))
    bench.link.abandon("gone")
    assert list(bench.link.batches(connection)) == []


def test_a_loss_is_reported_once(bench: Bench) -> None:
    bench.link.abandon("gone")
    bench.link.abandon("gone again")
    assert bench.inbox.lost.qsize() == 1


def test_a_closing_frame_means_that_the_peer_closed(bench: Bench) -> None:
    connection = bench.connect()
    bench.link.received(connection, control(Closing()))
    bench.link.disconnected(connection, "whatever")
    assert bench.inbox.loss() == "node_1 closed the link"


def test_frames_before_a_damaged_one_are_delivered_and_none_after(bench: Bench) -> None:
    connection = bench.connect()
    damaged = bytearray(frame(1))
    damaged[-1] ^= 1
    bench.link.received(connection, frame(0) + bytes(damaged) + frame(2))
    bench.link.received(connection, frame(3))
    assert "checksum" in bench.inbox.loss()
    assert bench.inbox.messages.qsize() == 1
    assert controls(list(bench.link.batches(connection))[-1]) == [Closing()]


def test_too_many_probes_lose_the_link(bench: Bench) -> None:
    connection = bench.connect()
    bench.link.received(connection, control(*map(Probe, range(10_000))))
    assert "more probes than can be answered" in bench.inbox.loss()


def test_unexpected_echoes_are_ignored(bench: Bench) -> None:
    connection = bench.connect()
    bench.link.received(connection, control(Echo(3), Echo(2**40), Echo(-1)))
    assert not bench.hung_up.is_set()
    assert bench.link.delay().round_trip == 0.0


def test_flush_in_a_handler_is_an_assertion_error(bench: Bench) -> None:
    failed: list[bool] = []

    def flush(link: object, message: Message) -> None:
        with pytest.raises(AssertionError, match="must not be called in a handler"):
            bench.link.flush(1)
        failed.append(True)

    bench.inbox.reply = flush
    bench.link.received(bench.connect(), frame(0))
    assert failed


# New connections


def test_a_new_connection_continues_after_what_the_peer_has(bench: Bench) -> None:
    first = bench.connect()
    for index in range(4):
        bench.link.send(message(index))
    all_batches(bench.link, first)
    bench.link.disconnected(first, "reset")
    bench.link.send(message(4))
    batch = bench.link.next_batch(bench.connect(Position(3)))
    numbers = [unseal(part, 1 << 30).number for part in split(batch or b"")][-2:]
    assert numbers == [3, 4]


def test_a_large_message_continues_in_its_middle(bench: Bench) -> None:
    tensor = torch.randn(400_000)
    bench.link.send(Message(Forward("run", MicrobatchId(0, 0), 1), {"x": tensor}))
    first = bench.connect()
    batch = bench.link.next_batch(first)
    assert batch is not None
    assembler = Assembler()
    for part in split(batch):
        if (each := unseal(part, 1 << 30)).kind is not Kind.CONTROL:
            assert assembler.take(each) is None
    frames, payload = assembler.partial
    assert 0 < payload < 1_600_000
    second = bench.connect(Position(0, frames, payload))
    assert bench.link.next_batch(first) is None
    rest = all_batches(bench.link, second)
    assert sum(map(len, rest)) < 1_601_000 - payload
    found = [
        assembler.take(each)
        for batch in rest
        for part in split(batch)
        if (each := unseal(part, 1 << 30)).kind is not Kind.CONTROL
    ]
    assert found[-1] is not None
    assert torch.equal(torch.as_tensor(found[-1].values["x"]), tensor)


def test_what_arrives_late_on_an_old_connection_is_ignored(bench: Bench) -> None:
    first = bench.connect()
    bench.link.received(first, frame(0))
    second = bench.connect()
    bench.link.received(first, frame(1))
    bench.link.received(second, frame(1) + frame(2))
    assert bench.inbox.messages.qsize() == 3
    assert bench.inbox.lost.empty()


def test_an_older_choice_of_a_connection_is_ignored(bench: Bench) -> None:
    bench.epochs = itertools.count(5)
    newest = bench.connect()
    hung_up = threading.Event()
    late = Connection(hung_up.set)
    bench.link.attach(late)
    bench.link.received(late, control(Resume(4, START)))
    assert hung_up.is_set()
    bench.link.received(newest, frame(0))
    assert bench.inbox.messages.qsize() == 1


@pytest.mark.parametrize(
    ("position", "reason"),
    [(Position(2), "2 messages"), (Position(1, 1, 10), "a part of a message that was not sent")],
)
def test_an_impossible_position_loses_the_link(bench: Bench, position: Position, reason: str) -> None:
    bench.link.send(message(0))
    bench.connect(position)
    assert reason in bench.inbox.loss()


def test_a_part_of_a_small_message_is_impossible(bench: Bench) -> None:
    bench.link.send(message(0))
    bench.link.next_batch(bench.connect(Position(0, 1, 4)))
    assert "does not have" in bench.inbox.loss()


@pytest.mark.parametrize("hostile", [Ack(5, 0.0), Resumed(1, START)])
def test_answers_to_nothing_lose_the_link(bench: Bench, hostile: Control) -> None:
    bench.link.received(bench.connect(), control(hostile))
    assert "invalid frame" in bench.inbox.loss()


def test_a_message_out_of_order_loses_the_link(bench: Bench) -> None:
    bench.link.received(bench.connect(), frame(0) + frame(2))
    assert "message 2 arrived, expected message 1" in bench.inbox.loss()


def test_an_acknowledgement_waits_for_other_frames_or_for_many_bytes(bench: Bench) -> None:
    connection = bench.connect()
    all_batches(bench.link, connection)
    bench.link.received(connection, frame(0))
    assert bench.link.next_batch(connection) is None
    large = b"".join(encode(message(1, ACK_BYTES // 4), number=1))
    bench.link.received(connection, large)
    assert [type(each) for each in controls(bench.link.next_batch(connection))] == [Ack]


def test_a_silent_connection_is_given_up(bench: Bench) -> None:
    bench.connect()
    for second in range(100):
        bench.link.tick(float(second))
        if bench.down:
            break
    assert bench.down == ["nothing arrives any more"]
    assert bench.hung_up.is_set()
    assert 4 < second < 12


def test_chunks_shrink_with_lost_connections(bench: Bench) -> None:
    for _ in range(5):
        bench.link.disconnected(bench.connect(), "reset")
    bench.link.send(message(0, CHUNK_BYTES))
    connection = bench.connect()
    bench.link.next_batch(connection)
    batch = bench.link.next_batch(connection)
    assert batch is not None
    assert SMALLEST_BYTES <= len(batch) < 2 * SMALLEST_BYTES
