"""Delay and cuts of the in-memory transport."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from transport_nodes import LOOPBACK, SECONDS, Inbox, connect, hello

from ravnest.errors import LinkClosedError, UnreachableError
from ravnest.transport.memory import MemoryNetwork
from ravnest.types import MicrobatchId
from ravnest.wire.messages import Forward, Message


def message(index: int, count: int = 10) -> Message:
    return Message(Forward("run", MicrobatchId(0, index), 1), {"x": torch.zeros(count)})


def test_delay_delays_messages_and_does_not_limit_their_number() -> None:
    network = MemoryNetwork(delay=0.5)
    pair = connect(network.transport(), network.transport())
    begin = time.monotonic()
    for index in range(40):
        pair.near.send(message(index, 300_000))
    assert pair.near.flush(10)  # one after another they would take 20 s
    assert time.monotonic() - begin >= 0.5
    assert pair.far_inbox.messages.qsize() == 40


def test_delay_is_measured() -> None:
    network = MemoryNetwork(delay=0.05)
    pair = connect(network.transport(), network.transport())
    pair.near.send(message(0))
    assert pair.near.flush(SECONDS)
    assert pair.near.delay().round_trip >= 0.1
    assert pair.near.delay().message >= 0.05


def test_a_cut_without_an_allowed_outage_loses_one_link_on_both_sides() -> None:
    network = MemoryNetwork(outage=0)
    server, inbox = network.transport(), Inbox()
    address = server.serve(LOOPBACK, lambda peer: hello(1), inbox, lambda link: None)
    zero, two = Inbox(), Inbox()
    network.transport().dial(address, hello(0), zero, deadline=SECONDS)
    kept = network.transport().dial(address, hello(2), two, deadline=SECONDS)
    network.cut(0, 1)
    assert zero.loss() == "lost node_1: the link between node_0 and node_1 was cut"
    assert inbox.loss() == "lost node_0: the link between node_0 and node_1 was cut"
    kept.send(message(3))
    inbox.next()
    assert two.lost.empty()
    network.cut(0, 1)


def test_a_cut_node_can_dial_again() -> None:
    network = MemoryNetwork(outage=0)
    pair = connect(network.transport(), network.transport())
    network.cut(1, 0)
    pair.near_inbox.loss()
    pair.near_transport.dial(pair.address, hello(0), pair.near_inbox, deadline=SECONDS).send(message(1))
    pair.far_inbox.next()


def test_parted_nodes_connect_after_they_are_healed() -> None:
    network = MemoryNetwork()
    pair = connect(network.transport(), network.transport())
    network.part(0, 1)
    for index in range(5):
        pair.near.send(message(index))
        pair.far.send(message(index))
    assert pair.far_inbox.messages.empty()
    network.heal(0, 1)
    assert [pair.far_inbox.next().head for _ in range(5)] == [message(i).head for i in range(5)]
    assert [pair.near_inbox.next().head for _ in range(5)] == [message(i).head for i in range(5)]


def test_an_outage_that_lasts_too_long_loses_the_link_on_both_sides() -> None:
    network = MemoryNetwork(outage=0.3)
    pair = connect(network.transport(), network.transport())
    network.part(0, 1)
    assert "no connection for 0.3 s (no route to the peer)" in pair.near_inbox.loss()
    assert "no connection for 0.3 s" in pair.far_inbox.loss()


def test_what_is_blocked_in_one_direction_arrives_later_and_the_other_direction_works() -> None:
    network = MemoryNetwork()
    pair = connect(network.transport(), network.transport())
    network.block(0, 1)
    for index in range(5):
        pair.near.send(message(index))
    pair.far.send(message(7))
    assert pair.near_inbox.next().head == message(7).head
    assert pair.far_inbox.messages.empty()
    assert pair.near.connected
    network.unblock(0, 1)
    assert [pair.far_inbox.next().head for _ in range(5)] == [message(i).head for i in range(5)]


def test_blocked_nodes_cannot_connect() -> None:
    network = MemoryNetwork()
    server = network.transport()
    address = server.serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None)
    network.block(1, 0)
    with pytest.raises(UnreachableError):
        network.transport().dial(address, hello(0), Inbox(), deadline=0.05, expect=1)
    with ThreadPoolExecutor() as pool:
        dialling = pool.submit(
            network.transport().dial, address, hello(0), Inbox(), deadline=SECONDS, expect=1
        )
        network.unblock(1, 0)
        assert dialling.result(SECONDS).peer.node == 1


def test_the_end_of_a_connection_ends_the_wait_for_what_is_blocked() -> None:
    network = MemoryNetwork(outage=0)
    pair = connect(network.transport(), network.transport())
    network.block(0, 1)
    pair.near.send(message(0))
    network.cut(0, 1)
    pair.far_inbox.loss()
    assert pair.far_inbox.messages.empty()


def test_what_nodes_send_can_be_changed() -> None:
    damaged = [False]

    def passage(sender: int, receiver: int, batch: bytes) -> list[tuple[float, bytes]]:
        flipped = batch[:-1] + bytes([batch[-1] ^ 1])
        return [(0.0, flipped if damaged[0] and (sender, receiver) == (0, 1) else batch)]

    network = MemoryNetwork(passage=passage)
    pair = connect(network.transport(), network.transport())
    pair.near.send(message(0))
    assert pair.far_inbox.next().head == message(0).head
    damaged[0] = True
    with suppress(LinkClosedError):  # a heartbeat may be damaged first
        pair.near.send(message(1))
    assert "sent an invalid frame: a frame is damaged" in pair.far_inbox.loss()
    if not pair.far_inbox.messages.empty():  # an acknowledgement behind the message was damaged
        assert pair.far_inbox.next().head == message(1).head
