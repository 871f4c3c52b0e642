"""A node whose machine was replaced: its neighbours find the new machine, and not the old one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from node_files import node_file

from ravnest.runtime.control.rendezvous import Links, Rendezvous
from ravnest.transport.base import Link
from ravnest.transport.generations import Generations
from ravnest.transport.memory import MemoryNetwork, MemoryTransport
from ravnest.transport.routes import Unanswered
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Goodbye, Hello, Message

SECONDS = 30.0
"""Limit of all waits; tests that pass wait far less."""
NEW_PORT = 9999


class Received:
    """A handler that keeps messages and losses."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self.lost: list[str] = []
        self.ended = threading.Event()

    def on_message(self, link: Link, message: Message) -> None:
        self.messages.put(message)

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost.append(reason)
        self.ended.set()


class Machine:
    """A machine that holds a node of a cluster of two."""

    def __init__(
        self,
        network: MemoryNetwork,
        node: int,
        *,
        generation: int = 0,
        starts: Generations | None = None,
    ) -> None:
        """``starts``: processes that this one has seen in earlier starts."""
        address = f"127.0.0.1:{NEW_PORT if generation else 8080 + node}"
        dials = {"dials_previous": True} if generation else {}
        self.spec = node_file(node, address=address, generation=generation, **dials)
        self.hello = Hello(
            PROTOCOL,
            "plan",
            node,
            0,
            node,
            addresses=(address,),
            generation=generation,
            incarnation=f"{node} {generation} {id(self)}",
        )
        self.generations = starts or Generations()
        self.handler = Received()
        self.transport: MemoryTransport = network.transport()
        self.links = Links()
        self.met: list[Link] = []
        """Links of those who have dialled ``listen``."""

    def meet(self, timeout: float = SECONDS) -> None:
        listen = Address.parse(self.spec.address)
        rendezvous = Rendezvous(self.spec, self.hello, listen, timeout, lambda _: None, self.generations)
        self.links = rendezvous.listen_and_dial(self.transport, self.handler)

    def listen(self) -> None:
        """Answer those who dial, and dial nobody."""
        address = Address.parse(self.spec.address)
        self.transport.serve(address, lambda _: self.hello, self.handler, self.met.append)


def meet(*machines: Machine) -> None:
    threads = [threading.Thread(target=machine.meet) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def after_takeover(network: MemoryNetwork) -> Iterator[tuple[Machine, Machine]]:
    """Return the Root, which knows the old address, and the machine that has taken the Leaf's place."""
    root, leaf = Machine(network, 0), Machine(network, 1, generation=1)
    meet(root, leaf)
    yield root, leaf
    root.transport.close()
    leaf.transport.close()


@pytest.mark.parametrize("dials", ["root", "leaf"])
def test_an_outage_after_a_takeover_is_survived_whoever_dials(
    network: MemoryNetwork,
    after_takeover: tuple[Machine, Machine],
    monkeypatch: pytest.MonkeyPatch,
    dials: str,
) -> None:
    root, leaf = after_takeover
    silent = leaf if dials == "root" else root
    monkeypatch.setattr(silent.transport._links, "_redial", lambda *_: Unanswered("it cannot dial"))
    network.cut(0, 1)
    assert root.links.next is not None
    assert leaf.links.previous is not None
    root.links.next.send(Message(Goodbye(0)))
    leaf.links.previous.send(Message(Goodbye(1)))
    assert leaf.handler.messages.get(timeout=SECONDS).head == Goodbye(0)
    assert root.handler.messages.get(timeout=SECONDS).head == Goodbye(1)
    assert root.handler.lost == leaf.handler.lost == []


def test_in_its_next_start_the_survivor_waits_for_the_new_machine(
    network: MemoryNetwork, after_takeover: tuple[Machine, Machine]
) -> None:
    """The machine that was replaced is back, listens at the address of the plan, and is not asked."""
    root, leaf = after_takeover
    root.transport.close()
    leaf.transport.close()
    old = Machine(network, 1)
    old.listen()
    again = Machine(network, 1, generation=1, starts=leaf.generations)
    survivor = Machine(network, 0, starts=root.generations)
    meet(survivor, again)
    assert survivor.links.next is not None
    assert survivor.links.next.peer.incarnation == again.hello.incarnation
    assert old.met == []
    for machine in (old, again, survivor):
        machine.transport.close()


def test_the_answer_of_a_machine_that_was_replaced_meanwhile_does_not_count(
    network: MemoryNetwork,
) -> None:
    root, old, new = Machine(network, 0), Machine(network, 1), Machine(network, 1, generation=1)

    def admit(_: Hello) -> Hello:
        assert root.generations.admit(new.hello) is None  # it connects in this moment
        return old.hello

    old.transport.serve(Address.parse(old.spec.address), admit, old.handler, lambda _: None)
    meets = threading.Thread(target=root.meet)
    meets.start()
    assert old.handler.ended.wait(SECONDS), "the Root has closed the link"
    meet(new)
    meets.join(SECONDS)
    assert root.links.next is not None
    assert root.links.next.peer.generation == 1
    for machine in (root, old, new):
        machine.transport.close()
