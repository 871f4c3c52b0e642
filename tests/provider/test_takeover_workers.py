"""Lost nodes with real worker processes: they start again, or a spare takes their place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_server import (
    SECONDS,
    UPDATES_PER_EPOCH,
    LoopbackServer,
    loopback_server,
    wait_for_updates,
)
from running_providers import providers, wait_for_reason, workers

from ravnest.client.handle import JobHandle
from ravnest.schemas.jobs import JobView

EPOCHS = 100


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LoopbackServer]:
    with loopback_server(tmp_path / "server") as found:
        yield found


def check_result(handle: JobHandle, epochs: int = EPOCHS) -> None:
    """Wait for the model and check that every update was made."""
    assert len(handle.result(timeout=SECONDS)) == 6
    assert list(handle.losses().updates) == list(range(epochs * UPDATES_PER_EPOCH))


def recoveries(handle: JobHandle) -> list[str]:
    return [event.reason for event in handle.events() if event.kind == "recovery"]


def test_a_worker_that_is_killed_starts_again_and_the_job_goes_on(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with (
        providers(server, tmp_path, "a", "b") as both,
        server.submit(min_providers=2, epochs=EPOCHS) as handle,
    ):
        wait_for_updates(handle)
        workers()[-1].kill()
        check_result(handle)
        lost, taken, *_ = recoveries(handle)
        assert "has lost its provider" in lost
        assert "SIGKILL" in lost
        assert "takes the place of node_" in taken
        for each in both:
            each.leave()
            assert not list(each.jobs_dir.assignments())


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_spare_takes_the_place_of_a_provider_that_is_killed(
    server: LoopbackServer, tmp_path: Path, lost: int
) -> None:
    with (
        providers(server, tmp_path, "a", "b") as both,
        server.submit(min_providers=2, epochs=EPOCHS) as handle,
    ):
        wait_for_updates(handle)
        with providers(server, tmp_path, "spare") as (spare,):
            on_node = handle.view().assignments[lost].provider_name
            victim = next(each for each in both if each.name == on_node)
            victim.kill()
            spare.wait_for("starts training")
            check_result(handle)
            assert any("spare takes the place" in each for each in recoveries(handle))
            victim.start()


def test_a_provider_that_is_killed_and_started_again_continues_where_it_was(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with (
        providers(server, tmp_path, "a", "b") as (_, victim),
        server.submit(min_providers=2, epochs=EPOCHS) as handle,
    ):
        wait_for_updates(handle)
        victim.kill()
        wait_for_reason(handle, "waits for a provider")
        victim.start()
        victim.wait_for("continues the assignment of an earlier run")
        check_result(handle)


LONG = 3 * EPOCHS
"""Epochs of a training that is not over before a spare has its files, also on a busy machine."""


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.full
def test_a_provider_that_leaves_hands_over_to_a_spare(
    server: LoopbackServer, tmp_path: Path, node: int
) -> None:
    with (
        providers(server, tmp_path, "a", "b") as both,
        server.submit(min_providers=2, max_providers=2, epochs=LONG) as handle,
    ):
        wait_for_updates(handle)
        with providers(server, tmp_path, "spare") as (spare,):
            name = handle.view().assignments[node].provider_name
            left = next(each for each in both if each.name == name)
            left.leave()
            assert not list(left.jobs_dir.assignments())
            spare.wait_for("starts training")
            check_result(handle, LONG)
            found = recoveries(handle)
            assert any("leaves (its owner stopped it)" in each for each in found), found
            source = f"stage {node} from the replica at stage {1 - node}"
            (recovered,) = [each for each in found if source in each]
            assert "; 0 updates are repeated;" in recovered


def test_the_spare_of_a_cluster_of_one_node_goes_on_where_its_provider_left(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with (
        providers(server, tmp_path, "a") as (left,),
        server.submit(max_providers=1, epochs=LONG) as handle,
    ):
        wait_for_updates(handle)
        with providers(server, tmp_path, "spare") as (spare,):
            made = handle.view().progress.updates
            left.leave()
            assert any("uploads its last checkpoint" in each for each in left.announced), left.announced
            spare.wait_for("starts training")
            check_result(handle, LONG)
            (taken,) = [each for each in recoveries(handle) if "spare takes the place" in each]
            start = re.search(r"from update (\d+), the newest checkpoint at the server", taken)
            assert start, taken
            assert int(start[1]) > made, "a checkpoint that was taken after the wish to leave"


def test_the_end_is_repeated_if_the_result_of_a_cluster_is_lost(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with (
        providers(server, tmp_path, "a", "b") as both,
        server.submit(min_providers=2, epochs=EPOCHS) as handle,
    ):
        wait_for_updates(handle)
        for each in both:
            each.wire.refuse["PUT /api/artifacts/"] = 403
        on_root = handle.view().assignments[0].provider_name
        root = next(each for each in both if each.name == on_root)
        root.wait_for("failed: refused with 403")
        for each in both:
            each.wire.refuse.clear()
        check_result(handle)
        found = recoveries(handle)
        end = EPOCHS * UPDATES_PER_EPOCH
        assert any(f"training continues from update {end};" in each for each in found), found
        # The other node has finished before the loss of the Root is known, or finishes after it.
        assert any("finished, and repeats the end" in each for each in found), found


def test_spares_of_a_whole_cluster_continue_from_the_checkpoint_at_the_server(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with (
        providers(server, tmp_path, "a", "b", "c", "d") as crew,
        server.submit(min_providers=2, max_providers=2, epochs=3 * EPOCHS) as handle,
    ):

        def on_change(view: JobView) -> None:
            if view.saved_update is not None:
                raise StopIteration

        with pytest.raises(StopIteration):
            handle.wait(SECONDS, on_change)
        names = {each.provider_name for each in handle.view().assignments}
        lost = [each for each in crew if each.name in names]
        for each in lost:
            each.kill()
        for each in lost:
            server.running.server.provider_service.leave(each.provider.id, "killed")
        check_result(handle, 3 * EPOCHS)
        found = recoveries(handle)
        words = "the newest checkpoint at the server"
        # The spare of the first one starts again if it begins before the second one is known to be lost.
        assert sum("takes the place" in each and words in each for each in found) in (2, 3), found
