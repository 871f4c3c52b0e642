"""Nodes whose process was restarted, or whose machine was replaced, take part again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from service_clusters import SECONDS, Outside, Process

from ravnest.averaging.coordinator import Mode
from ravnest.averaging.outcome import RoundOutcome
from ravnest.averaging.peers import IgnoringHandler, Peers
from ravnest.averaging.two_phase_commit import BEHIND
from ravnest.errors import RefusedError
from ravnest.transport.memory import MemoryNetwork
from ravnest.types import Address
from ravnest.wire.messages import Abort

CLUSTERS = 3


@pytest.fixture
def lasting() -> MemoryNetwork:
    """Return a network on which links wait for another connection."""
    return MemoryNetwork()


@pytest.fixture
def opened(lasting: MemoryNetwork) -> Iterator[Callable[..., list[Process]]]:
    made: list[Process] = []

    def start(mode: Mode = "background", codec: str = "raw") -> list[Process]:
        outside = Outside(lasting, CLUSTERS, mode, codec)
        made.extend(Process(outside, cluster) for cluster in range(CLUSTERS))
        open_all(made)
        return made

    yield start
    for process in made:
        process.service.close(None)
        process.transport.close()
        assert process.errors == []


def open_all(processes: Sequence[Process]) -> None:
    threads = [threading.Thread(target=process.open) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def round_of_all(processes: Sequence[Process]) -> RoundOutcome:
    """Train until all clusters average together; Roots may be connected again one after the other."""
    return round_of(processes, range(CLUSTERS))


def round_of(processes: Sequence[Process], wanted: Iterable[int]) -> RoundOutcome:
    """Train until these clusters average, with others or without."""
    outside, wanted = processes[0].outside, set(wanted)
    for _ in range(5):
        for process in processes:
            process.service.updated(8)
            if outside.mode == "blocking":
                process.service.pause(final=False)
        outcome = outside.outcomes.get(timeout=SECONDS)
        if outside.mode == "blocking":
            for process in processes:
                process.released.get(timeout=SECONDS)
        if outcome.committed and wanted <= outcome.weights.keys():
            return outcome
    raise AssertionError(f"clusters {sorted(wanted)} are in no round: {outcome.describe()}")


@pytest.mark.parametrize("mode", ["background", "blocking"])
def test_every_root_says_when_a_round_begins_and_ends(
    opened: Callable[..., list[Process]], mode: Mode
) -> None:
    processes = opened(mode)
    round_of_all(processes)
    for process in processes:
        assert [process.rounds.get(timeout=SECONDS) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("cluster", [0, 1])
def test_a_cluster_that_went_back_takes_the_parameters_of_the_others(
    opened: Callable[..., list[Process]], cluster: int
) -> None:
    """Its checkpoint is older than the last round, whose average contains what it had trained."""
    processes = opened()
    for _ in range(3):
        round_of_all(processes)
    restart(processes, cluster, newest=0)
    after = round_of(processes, [cluster])
    assert after.weights[cluster] == 0.0
    assert after.problems == {cluster: BEHIND}
    later = [round_of_all(processes) for _ in range(3)]
    assert not any(outcome.problems for outcome in later)
    assert any(outcome.weights[cluster] for outcome in later), "from then on it contributes"
    end_training(processes)


@pytest.mark.parametrize("cluster", [0, 1])
def test_a_cluster_that_begins_again_takes_the_parameters_of_the_others(
    opened: Callable[..., list[Process]], cluster: int
) -> None:
    """All its nodes were lost before their first checkpoint: it has the original weights."""
    processes = opened()
    round_of_all(processes)
    restart(processes, cluster, newest=-1)
    after = round_of(processes, [cluster])
    assert after.weights[cluster] == 0.0
    assert after.problems == {cluster: BEHIND}
    end_training(processes)


def test_the_first_round_of_a_run_has_all_clusters(opened: Callable[..., list[Process]]) -> None:
    """Nodes that are told to continue a run, if there is one, begin one that nobody is ahead in."""
    processes = opened()
    for process in processes:
        process.service.continue_from(updates=0, samples=0, newest=-1, after_loss=True)
    first = round_of_all(processes)
    assert not first.problems
    assert all(first.weights.values())
    end_training(processes)


def restart(
    processes: list[Process], cluster: int, *, generation: int = 0, newest: int | None = None
) -> None:
    """Start a process again; from a checkpoint if ``newest`` is given, the round of its average."""
    outside = processes[0].outside
    processes[cluster].kill()
    processes[cluster] = again = Process(outside, cluster, start=1, generation=generation)
    if newest is not None:
        again.service.continue_from(updates=1, samples=8, newest=newest, after_loss=True)
    again.open()


@pytest.mark.parametrize("mode", ["background", "blocking"])
@pytest.mark.parametrize("generation", [0, 1], ids=["same address", "another machine"])
@pytest.mark.parametrize("cluster", [0, 1])
def test_a_cluster_that_comes_back_is_in_the_next_round_and_all_agree(
    opened: Callable[..., list[Process]], mode: Mode, generation: int, cluster: int
) -> None:
    processes = opened(mode)
    before = round_of_all(processes)
    restart(processes, cluster, generation=generation)
    after = round_of_all(processes)
    assert after.round > before.round, "numbers go on, also after the coordinator was restarted"
    end_training(processes)


def end_training(processes: Sequence[Process], *, waiting: Sequence[Process] = ()) -> None:
    """Let all clusters end together; those of ``waiting`` have requested the final round already."""
    for kept in (False, True):
        for process in processes:
            if kept or process not in waiting:
                process.service.pause(final=True, kept=kept, call=1)
        applied = [process.released.get(timeout=SECONDS) for process in processes]
        assert applied == [not kept] * len(processes)
    assert all(torch.equal(processes[0].weights.values, each.weights.values) for each in processes)


def final_requests(processes: Sequence[Process]) -> None:
    for process in processes:
        process.service.pause(final=True, call=1)


@pytest.mark.parametrize("cluster", [0, 1])
@pytest.mark.parametrize("generation", [0, 1], ids=["same address", "another machine"])
def test_a_cluster_in_recovery_is_part_of_the_final_round(
    opened: Callable[..., list[Process]], cluster: int, generation: int
) -> None:
    processes = opened()
    others = [process for process in processes if process.cluster != cluster]
    round_of_all(processes)
    final_requests(others)
    restart(processes, cluster, generation=generation)
    processes[cluster].service.updated(8)
    end_training(processes, waiting=others)


@pytest.mark.parametrize("cluster", [0, 2])
def test_a_cluster_that_fails_says_so_and_nobody_waits_for_it(
    opened: Callable[..., list[Process]], cluster: int
) -> None:
    processes = opened()
    others = [process for process in processes if process.cluster != cluster]
    round_of_all(processes)
    final_requests(others)
    processes[cluster].service.close(Abort(cluster, "a label is out of range"))
    end_training(others, waiting=others)


@pytest.mark.parametrize("cluster", [0, 2])
def test_a_cluster_that_fails_in_its_recovery_says_so(
    opened: Callable[..., list[Process]], lasting: MemoryNetwork, cluster: int
) -> None:
    processes = opened()
    others = [process for process in processes if process.cluster != cluster]
    round_of_all(processes)
    final_requests(others)
    processes[cluster].kill()
    again = Process(processes[0].outside, cluster, start=1)
    peers = Peers(again.spec, again.hello, again.transport, IgnoringHandler())
    peers.say_goodbye(Abort(cluster, "node_9 has not connected"), SECONDS)
    end_training(others, waiting=others)
    again.transport.close()


def test_a_member_without_the_last_average_takes_part_uncompressed(
    opened: Callable[..., list[Process]],
) -> None:
    processes = opened("blocking", "int8")
    exact = round_of_all(processes).sent_bytes
    assert round_of_all(processes).sent_bytes < exact / 2
    restart(processes, 1)
    assert round_of_all(processes).sent_bytes == exact, "the restarted node has no average yet"
    assert round_of_all(processes).sent_bytes < exact / 2
    assert all(torch.equal(processes[0].weights.values, each.weights.values) for each in processes)


def test_a_machine_that_was_replaced_is_refused(
    opened: Callable[..., list[Process]], lasting: MemoryNetwork
) -> None:
    """It was only slow: its place has been taken by another machine meanwhile."""
    processes = opened()
    slow = processes[1]
    processes[1] = Process(slow.outside, 1, start=1, generation=1)
    processes[1].open()
    round_of_all(processes)
    address = Address.parse(processes[0].hello.addresses[0])
    with pytest.raises(RefusedError, match="node_1 was replaced by another machine"):
        lasting.transport().dial(address, slow.hello, IgnoringHandler(), deadline=SECONDS)
    slow.service.close(None)
    slow.transport.close()


def test_the_samples_since_the_last_average_survive_a_restart(
    opened: Callable[..., list[Process]],
) -> None:
    processes = opened("blocking")
    processes[1].service.continue_from(updates=7, samples=24)
    outcome = round_of_all(processes)  # 8 samples each, and 24 of the run before
    assert outcome.weights == pytest.approx({0: 8 / 48, 1: 32 / 48, 2: 8 / 48})
    assert [process.service.samples for process in processes] == [0, 0, 0]
    processes[1].service.updated(8)
    assert processes[1].service.samples == 8
