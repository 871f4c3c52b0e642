"""Contract of every transport; each test runs in memory, on sockets and on gRPC."""

import contextlib
import gc
import threading
import time
import weakref
from queue import Empty

import pytest
import torch
from msgspec import structs
from transport_nodes import LOOPBACK, SECONDS, Inbox, Opener, Pair, connect, hello, refuse

from ravnest.errors import AddressInUseError, LinkClosedError, RefusedError, UnreachableError
from ravnest.transport.base import Link
from ravnest.types import Address, MicrobatchId
from ravnest.wire.messages import Forward, Goodbye, Hello, HelloRefused, Message, SaveStage


def numbered(index: int, **values: torch.Tensor) -> Message:
    return Message(Forward("run", MicrobatchId(0, index), 1), values)


def index_of(message: Message) -> int:
    assert isinstance(message.head, Forward)
    return message.head.microbatch.index


def nothing_more(inbox: Inbox) -> bool:
    return inbox.lost.empty() and inbox.messages.empty()


def test_both_sides_know_each_other(pair: Pair) -> None:
    assert (pair.near.local, pair.near.peer) == (hello(0), hello(1))
    assert (pair.far.local, pair.far.peer) == (hello(1), hello(0))


def test_messages_arrive_in_order_both_ways(pair: Pair) -> None:
    for index in range(200):
        pair.near.send(numbered(index))
        pair.far.send(numbered(1000 + index))
    assert [index_of(pair.far_inbox.next()) for _ in range(200)] == list(range(200))
    assert [index_of(pair.near_inbox.next()) for _ in range(200)] == list(range(1000, 1200))


@pytest.mark.parametrize("count", [0, 1, 1000, 65_536, 65_537, 3_000_000])
def test_tensors_arrive_unchanged(pair: Pair, count: int) -> None:
    tensor = torch.randn(count)
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    pair.near.send(numbered(0, tensor=tensor, image=image))
    values = pair.far_inbox.next().values
    assert isinstance(values["image"], torch.Tensor)
    assert isinstance(values["tensor"], torch.Tensor)
    assert values["tensor"].equal(tensor)
    assert values["image"].equal(image)
    assert values["image"].stride() == image.stride()


def test_large_messages_both_ways_at_once(pair: Pair) -> None:
    tensor = torch.randn(2_000_000)
    for index in range(4):
        pair.near.send(numbered(index, x=tensor))
        pair.far.send(numbered(index, x=tensor))
    for inbox in (pair.near_inbox, pair.far_inbox):
        for index in range(4):
            message = inbox.next()
            assert index_of(message) == index
            assert torch.equal(torch.as_tensor(message.values["x"]), tensor)


def test_bytes_are_counted(pair: Pair) -> None:
    pair.near.send(numbered(0, x=torch.zeros(100_000)))
    assert pair.near.flush(SECONDS)
    assert 400_000 < pair.near.sent_bytes < 402_000
    assert 400_000 < pair.far.received_bytes < 402_000
    assert pair.near.received_bytes < 1000


def test_a_handler_may_answer(transport: Opener) -> None:
    pair = connect(
        transport(), transport(), far_inbox=Inbox(reply=lambda link, message: link.send(message))
    )
    pair.near.send(numbered(7))
    assert index_of(pair.near_inbox.next()) == 7


def test_a_server_can_send_from_on_link(transport: Opener) -> None:
    near, far, inbox = transport(), transport(), Inbox()
    address = far.serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: link.send(numbered(3)))
    near.dial(address, hello(0), inbox, deadline=SECONDS)
    assert index_of(inbox.next()) == 3


def test_one_server_has_many_links(transport: Opener) -> None:
    far, inbox = transport(), Inbox(reply=lambda link, message: link.send(message))
    address = far.serve(LOOPBACK, lambda peer: hello(9), inbox, lambda link: None)
    inboxes = [Inbox() for _ in range(4)]
    links = [
        transport().dial(address, hello(node), each, deadline=SECONDS)
        for node, each in enumerate(inboxes)
    ]
    for node, link in enumerate(links):
        link.send(numbered(node))
    assert [index_of(each.next()) for each in inboxes] == [0, 1, 2, 3]


def test_flush_waits_for_arrival(pair: Pair) -> None:
    for index in range(20):
        pair.near.send(numbered(index, x=torch.zeros(100_000)))
    assert pair.near.flush(SECONDS)
    assert pair.far_inbox.messages.qsize() == 20


def test_queued_messages_are_written_without_an_answer(pair: Pair) -> None:
    for index in range(20):
        pair.near.send(numbered(index, x=torch.zeros(100_000)))
    assert pair.near.wait_written(SECONDS)
    assert [index_of(pair.far_inbox.next()) for _ in range(20)] == list(range(20))


def test_the_wait_for_the_writer_ends_with_the_link(pair: Pair) -> None:
    pair.near.close()
    assert pair.near.wait_written(SECONDS)


def test_flush_times_out(transport: Opener) -> None:
    stalled, entered = threading.Event(), threading.Event()

    def stall(link: Link, message: Message) -> None:
        entered.set()
        stalled.wait(SECONDS)

    pair = connect(transport(), transport(), far_inbox=Inbox(reply=stall))
    pair.near.send(numbered(0))
    assert entered.wait(SECONDS)
    assert not pair.near.flush(0.05)
    stalled.set()
    assert pair.near.flush(SECONDS)


# End of links


def test_links_to_an_excluded_machine_end_as_lost_ones(pair: Pair) -> None:
    pair.near_transport.drop(2, 0, "another node")
    pair.near.send(numbered(0))
    assert index_of(pair.far_inbox.next()) == 0, "links to other nodes stay"
    pair.near_transport.drop(1, 0, "it was excluded")
    assert pair.near_inbox.loss() == "it was excluded"
    pair.far_inbox.loss()
    with pytest.raises(LinkClosedError):
        pair.near.send(numbered(1))


def test_a_peer_has_one_link_of_those_that_it_opens(transport: Opener, pair: Pair) -> None:
    """Only the newest is obeyed, whichever process of the peer opens it; others keep theirs."""
    other = transport().dial(pair.address, hello(2), Inbox(), deadline=SECONDS)
    again, inbox = structs.replace(hello(0), incarnation="another start"), Inbox()
    first = pair.near_transport.dial(pair.address, hello(0), inbox, deadline=SECONDS)
    assert pair.far_inbox.loss() == "node_0 has opened another link"
    pair.near_inbox.loss()
    second = transport().dial(pair.address, again, Inbox(), deadline=SECONDS)
    assert pair.far_inbox.loss() == "node_0 has opened another link"
    inbox.loss()
    for old in (pair.near, first):
        with pytest.raises(LinkClosedError):
            old.send(numbered(1))
    for link, index in ((second, 2), (other, 3)):
        link.send(numbered(index))
        assert index_of(pair.far_inbox.next()) == index
    assert nothing_more(pair.far_inbox)


def test_links_that_two_nodes_open_to_each_other_stay(transport: Opener, pair: Pair) -> None:
    inbox = Inbox()
    back = pair.near_transport.serve(LOOPBACK, lambda _: hello(0), inbox, lambda _: None)
    link = pair.far_transport.dial(back, hello(1), Inbox(), deadline=SECONDS)
    link.send(numbered(1))
    pair.near.send(numbered(2))
    assert index_of(inbox.next()) == 1
    assert index_of(pair.far_inbox.next()) == 2
    assert nothing_more(pair.far_inbox)


def test_closing_flushes_and_notifies_the_other_side(pair: Pair) -> None:
    for index in range(50):
        pair.near.send(numbered(index, x=torch.zeros(50_000)))
    pair.near.close()
    assert [index_of(pair.far_inbox.next()) for _ in range(50)] == list(range(50))
    assert "node_0 closed" in pair.far_inbox.loss()
    assert nothing_more(pair.far_inbox)
    assert nothing_more(pair.near_inbox)


def test_the_listening_side_can_close_too(pair: Pair) -> None:
    for index in range(50):
        pair.far.send(numbered(index, x=torch.zeros(50_000)))
    pair.far.close()
    assert [index_of(pair.near_inbox.next()) for _ in range(50)] == list(range(50))
    assert "node_1 closed" in pair.near_inbox.loss()
    assert nothing_more(pair.near_inbox)
    assert nothing_more(pair.far_inbox)


def test_a_close_after_a_goodbye_is_not_a_loss(pair: Pair) -> None:
    pair.near.send(Message(Goodbye(0)))
    pair.near.close()
    assert pair.far_inbox.next() == Message(Goodbye(0), {})
    pair.far.close()
    with pytest.raises(LinkClosedError):
        pair.far.send(numbered(0))
    assert nothing_more(pair.far_inbox)


def test_close_may_be_called_repeatedly_and_by_both_sides(pair: Pair) -> None:
    threads = [
        threading.Thread(target=link.close) for link in (pair.near, pair.far, pair.near, pair.far)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    pair.near.close()
    losses = [inbox.lost.qsize() for inbox in (pair.near_inbox, pair.far_inbox)]
    assert losses in ([0, 0], [0, 1], [1, 0])  # one side may have closed before the other began


def test_sending_on_a_closed_link_is_an_error(pair: Pair) -> None:
    pair.near.close()
    with pytest.raises(LinkClosedError, match="node_1 is closed"):
        pair.near.send(numbered(0))
    pair.far_inbox.loss()
    with pytest.raises(LinkClosedError, match="node_0 is lost"):
        pair.far.send(numbered(0))
    assert not pair.far.flush(SECONDS)


def test_a_handler_may_close_its_link(transport: Opener) -> None:
    def close(link: Link, message: Message) -> None:
        link.send(numbered(5))
        link.close()

    pair = connect(transport(), transport(), far_inbox=Inbox(reply=close))
    pair.near.send(numbered(0))
    assert index_of(pair.near_inbox.next()) == 5
    assert "node_1 closed" in pair.near_inbox.loss()


def test_a_handler_may_close_its_lost_link(transport: Opener) -> None:
    closed = threading.Event()

    class Closing(Inbox):
        def on_lost(self, link: Link, reason: str) -> None:
            link.close()
            closed.set()

    pair = connect(transport(), transport(), far_inbox=Closing())
    pair.near.close()
    assert closed.wait(SECONDS)


def test_a_handler_that_fails_loses_the_link(transport: Opener) -> None:
    def fail(link: Link, message: Message) -> None:
        raise ValueError("no such batch")

    pair = connect(transport(), transport(), far_inbox=Inbox(reply=fail))
    pair.near.send(numbered(0))
    assert "no such batch" in pair.far_inbox.loss()
    assert pair.near_inbox.loss()


def test_an_unsupported_value_loses_the_link(pair: Pair) -> None:
    pair.near.send(numbered(0, x=torch.eye(2).to_sparse()))
    assert "only dense tensors" in pair.near_inbox.loss()
    assert pair.far_inbox.loss()


def test_closing_a_transport_closes_its_links(pair: Pair) -> None:
    pair.near.send(numbered(1))
    pair.far_transport.close()
    assert "node_1 closed" in pair.near_inbox.loss()
    assert nothing_more(pair.near_inbox)
    pair.far_transport.close()


def test_a_closed_transport_does_not_listen(transport: Opener) -> None:
    far = transport()
    address = far.serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None)
    far.close()
    with pytest.raises(UnreachableError):
        transport().dial(address, hello(0), Inbox(), deadline=0.2)
    again = transport()
    assert again.serve(address, lambda peer: hello(1), Inbox(), lambda link: None) == address


def test_a_peer_that_dials_while_a_node_closes_reaches_the_next_one(transport: Opener) -> None:
    """As when a node that has lost a neighbour makes a new transport, at the same address."""
    old, inbox = transport(), Inbox()
    address = free_address(transport)
    restarted = threading.Event()

    def restart() -> None:
        old.close()
        transport().serve(address, lambda peer: hello(1), inbox, lambda link: None)
        restarted.set()

    def admit(_: Hello) -> Hello:
        if not restart_thread.is_alive():
            restart_thread.start()
        assert old._links.closed.wait(SECONDS)  # type: ignore[attr-defined]
        return hello(1)

    restart_thread = threading.Thread(target=restart, daemon=True)
    old.serve(address, admit, Inbox(), lambda link: None)
    link = transport().dial(address, hello(0), Inbox(), deadline=SECONDS)
    assert restarted.wait(SECONDS)
    link.send(numbered(4))
    assert index_of(inbox.next()) == 4


def test_a_lost_link_can_be_dialled_again(pair: Pair) -> None:
    pair.near.close()
    pair.far_inbox.loss()
    link = pair.near_transport.dial(pair.address, hello(0), pair.near_inbox, deadline=SECONDS)
    link.send(numbered(4))
    assert index_of(pair.far_inbox.next()) == 4


def test_an_idle_link_keeps_no_tensors(pair: Pair) -> None:
    tensor = torch.randn(1000)
    gone = threading.Event()
    weakref.finalize(tensor, gone.set)
    pair.near.send(numbered(0, x=tensor))
    del tensor
    assert pair.near.flush(SECONDS)
    gc.collect()
    assert gone.wait(SECONDS)


# Admission


def test_a_refusal_reaches_the_caller_at_once(transport: Opener) -> None:
    far = transport()
    address = far.serve(LOOPBACK, refuse, Inbox(), lambda link: None)
    with pytest.raises(RefusedError, match=r"refused: plan 'plan' is not mine"):
        transport().dial(address, hello(0), Inbox(), deadline=SECONDS)


def test_another_protocol_is_refused(transport: Opener) -> None:
    far, asked = transport(), []

    def admit(peer: Hello) -> Hello | HelloRefused:
        asked.append(peer)
        return hello(1)

    address = far.serve(LOOPBACK, admit, Inbox(), lambda link: None)
    strange = Hello(99, "plan", 0, 0, 0)
    with pytest.raises(RefusedError, match=r"protocol 99 .* same version of Ravnest"):
        transport().dial(address, strange, Inbox(), deadline=SECONDS)
    assert not asked


def test_the_wrong_node_is_refused(transport: Opener) -> None:
    far, inbox = transport(), Inbox()
    address = far.serve(LOOPBACK, lambda peer: hello(1), inbox, lambda link: None)
    with pytest.raises(
        RefusedError, match=r"node_1 answers at .* expected node_2|no certificate of node_2"
    ):
        transport().dial(address, hello(0), Inbox(), deadline=SECONDS, expect=2)
    inbox2 = Inbox()
    transport().dial(address, hello(0), inbox2, deadline=SECONDS, expect=1).send(
        Message(SaveStage("run"))
    )
    assert inbox.next().head == SaveStage("run")


def test_an_error_in_admit_refuses_the_peer(transport: Opener) -> None:
    def admit(peer: Hello) -> Hello | HelloRefused:
        raise ValueError("no such plan")

    address = transport().serve(LOOPBACK, admit, Inbox(), lambda link: None)
    with pytest.raises(RefusedError, match="no such plan"):
        transport().dial(address, hello(0), Inbox(), deadline=SECONDS)


def test_an_error_in_on_link_loses_the_link(transport: Opener) -> None:
    def fail(link: Link) -> None:
        raise ValueError("too many links")

    inbox = Inbox()
    address = transport().serve(LOOPBACK, lambda peer: hello(1), inbox, fail)
    with contextlib.suppress(RefusedError, UnreachableError):
        transport().dial(address, hello(0), Inbox(), deadline=0.2)
    assert "too many links" in inbox.loss()


# Dialling


def free_address(transport: Opener) -> Address:
    taken = transport()
    address = taken.serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None)
    taken.close()
    return address


def test_an_unreachable_peer_is_reported_with_address_and_reason(transport: Opener) -> None:
    address = free_address(transport)
    with pytest.raises(UnreachableError, match=rf"{address} in 0.3 s: .*listens"):
        transport().dial(address, hello(0), Inbox(), deadline=0.3)


def test_dialling_waits_for_the_peer(transport: Opener) -> None:
    address = free_address(transport)
    told: list[str] = []

    def appear(reason: str) -> None:
        told.append(reason)
        transport().serve(address, lambda peer: hello(1), Inbox(), lambda link: None)

    link = transport().dial(address, hello(0), Inbox(), deadline=SECONDS, waiting=appear)
    assert link.peer == hello(1)
    assert len(told) == 1
    assert told[0].startswith("nothing listens ")


def test_a_port_in_use_says_what_to_do(transport: Opener) -> None:
    address = transport().serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None)
    with pytest.raises(AddressInUseError, match=rf"{address} is in use: stop .* another port"):
        transport().serve(address, lambda peer: hello(1), Inbox(), lambda link: None)


# Delays


def test_delay_is_measured(pair: Pair) -> None:
    for index in range(8):
        pair.near.send(numbered(index))
        assert pair.near.flush(SECONDS)
    delay = pair.near.delay()
    assert 0 < delay.round_trip < SECONDS
    assert 0 < delay.message < SECONDS


def test_probes_are_not_delivered(pair: Pair) -> None:
    assert pair.near.flush(SECONDS)
    assert pair.far.flush(SECONDS)
    with pytest.raises(Empty):
        pair.near_inbox.messages.get_nowait()
    assert nothing_more(pair.far_inbox)


@pytest.fixture
def earlier_threads() -> set[threading.Thread]:
    """Threads of earlier tests, which may not have ended yet."""
    return set(threading.enumerate())


@pytest.mark.usefixtures("kind")
def test_threads_end_with_their_links(earlier_threads: set[threading.Thread], pair: Pair) -> None:
    pair.near.close()
    pair.far_inbox.loss()
    pair.far.close()
    deadline = time.monotonic() + SECONDS
    for thread in set(threading.enumerate()) - earlier_threads:
        if "link" in thread.name:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), thread.name
