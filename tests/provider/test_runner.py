"""Providers with real worker processes, and a real server in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loopback_server import (
    SECONDS,
    UPDATES_PER_EPOCH,
    LoopbackServer,
    loopback_server,
    wait_for_updates,
)
from running_providers import available_sandbox, providers, wait_for_reason, workers

from ravnest.errors import JobEndedError
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.link_tests import LinkView
from ravnest.schemas.providers import ProviderState
from ravnest.schemas.reachability import RelayTrip


def confidence(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the probability of the chosen class, for each sample."""
    return output.softmax(1).amax(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    with loopback_server(tmp_path_factory.mktemp("server")) as found:
        yield found


def test_two_providers_train_and_the_root_uploads_the_model(
    server: LoopbackServer, tmp_path: Path
) -> None:
    options = {"min_providers": 2, "metrics": ["accuracy", confidence], "keep_best": "loss", "ema": 0.5}
    with providers(server, tmp_path, "two-a", "two-b") as both, server.submit(**options) as handle:
        state = handle.result(timeout=SECONDS)
        assert len(state) == 6
        metrics = handle.progress().metrics
        assert set(metrics) == {"accuracy", "confidence", "loss"}
        view = handle.view().best
        assert view is not None
        assert (view.epoch, view.metric, view.value) == (2, "loss", metrics["loss"])
        best = handle.best(folder=tmp_path / "best")
        assert all(torch.equal(best[name], state[name]) for name in state), "the last epoch was better"
        assert (tmp_path / "best" / "best_state_dict.pt").is_file()
        raw = handle.result(folder=tmp_path / "raw", raw=True)
        assert (tmp_path / "raw" / "raw_state_dict.pt").is_file()
        assert list(raw) == list(state)
        assert not any(torch.equal(raw[name], state[name]) for name in state), "the result is averaged"
        for node in handle.view().assignments:
            assert node.memory is not None
            used, peak = node.memory.used, node.memory.peak
            assert used is not None
            assert peak is not None
            assert 0 <= used <= peak < 1e9, "what imported modules hold is not the job's"
        history = handle.losses()
        assert len(history.losses) == 2 * UPDATES_PER_EPOCH
        assert all(loss is not None and loss > 0 for loss in history.losses)
        assert len(history.validations) == 3, "after each epoch and at the end"
        assert all(0 <= (each.value or 0) <= 1 for each in history.validations)
        for each in both:
            assert any("starts training" in line for line in each.announced)
            each.leave()
            assert each.announced[-1].endswith("its owner stopped it")
            assert not list(each.jobs_dir.assignments())
    for each in both:
        view = server.provider(each.name)
        assert view.state is ProviderState.LOST
        assert "its owner stopped it" in view.reason


def test_providers_measure_their_link_before_a_job_starts(tmp_path: Path) -> None:
    with (
        loopback_server(tmp_path / "measured", test_links=True) as server,
        providers(server, tmp_path, "link-a", "link-b") as both,
        server.submit(min_providers=2) as handle,
    ):
        handle.result(timeout=SECONDS)
        reasons = [event.reason for event in handle.events()]
        assert "measuring the link between link-a and link-b" in reasons
        assert "(measured)" in handle.view().plan
        for each in both:
            assert sum("measures the link to" in line for line in each.announced) == 1
        with server.api(ApiRole.VIEWER, "viewer") as api:
            (link,) = api.get("/api/links", list[LinkView])
        assert link.route == "direct"
        assert min(link.forward, link.back) > 1
        assert link.failure == ""


def test_a_cancelled_job_stops_its_workers(server: LoopbackServer, tmp_path: Path) -> None:
    with (
        providers(server, tmp_path, "cancel-a", "cancel-b") as both,
        server.submit(min_providers=2, epochs=100_000) as handle,
    ):
        wait_for_updates(handle)
        assert len(workers()) == 2
        if available_sandbox() is not None:
            for worker in workers():
                status = Path(f"/proc/{worker.pid}/status").read_text()
                assert "\nSeccomp:\t2\n" in status, "system calls are filtered"
                assert "\nNoNewPrivs:\t1\n" in status
        handle.cancel()
        for each in both:
            each.leave()
        assert not workers()
        assert not any(list(each.jobs_dir.assignments()) for each in both)


def test_a_server_that_was_away_gets_everything_later(server: LoopbackServer, tmp_path: Path) -> None:
    epochs = 30
    with providers(server, tmp_path, "away") as (only,), server.submit(epochs=epochs) as handle:
        only.wait_for("starts training")
        only.wire.down = True
        only.wire.wait_for("POST /api/artifacts/missing")  # the first try to upload
        only.wire.down = False
        handle.result(timeout=SECONDS)
        assert list(handle.losses().updates) == list(range(epochs * UPDATES_PER_EPOCH))


def test_a_worker_that_takes_more_than_offered_is_ended(server: LoopbackServer, tmp_path: Path) -> None:
    with (
        providers(server, tmp_path, "small", ram=0.001),
        server.submit(epochs=100_000, width=3000) as handle,  # 36 MB, and a gradient
        pytest.raises(JobEndedError, match=r"0\.00 GB are offered"),
    ):
        handle.result(timeout=SECONDS)
    assert not workers()


def test_an_assignment_with_a_damaged_file_fails_before_a_worker_starts(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with providers(server, tmp_path, "damaged") as (only,):
        only.wire.alter["GET /api/artifacts/"] = lambda body: body[:-1] + b"?"
        with server.submit() as handle, pytest.raises(JobEndedError, match="sent other bytes"):
            handle.result(timeout=SECONDS)
        assert not any("starts training" in line for line in only.announced)


@pytest.mark.parametrize("status", [500, 507])
def test_an_error_of_the_server_does_not_discard_a_trained_model(
    server: LoopbackServer, tmp_path: Path, status: int
) -> None:
    with providers(server, tmp_path, f"error-{status}") as (only,), server.submit() as handle:
        only.wait_for("starts training")
        only.wire.refuse["PUT /api/artifacts/"] = status
        only.wait_for("are kept here and sent again")
        only.wire.refuse.clear()
        assert len(handle.result(timeout=SECONDS)) == 6
        events = [event.reason for event in handle.events() if event.kind == "warning"]
        assert any("its trained stages are not here yet" in reason for reason in events)


def test_a_provider_that_is_restarted_after_training_sends_its_result(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with providers(server, tmp_path, "again") as (only,), server.submit(epochs=30) as handle:
        only.wait_for("starts training")
        only.wire.down = True
        only.wait_for("are kept here and sent again")
        only.kill()
        (assignment,) = only.jobs_dir.assignments()
        assert only.jobs_dir.job_dir(assignment).read_outcome() is not None
        only.start()
        assert len(handle.result(timeout=SECONDS)) == 6
        assert list(handle.losses().updates) == list(range(30 * UPDATES_PER_EPOCH))
        assert not workers()


def test_workers_start_when_all_providers_have_their_files(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with providers(server, tmp_path, "fast", "slow") as (_, slow):
        slow.wire.hold("GET /api/artifacts/")
        with server.submit(min_providers=2) as handle:
            try:
                wait_for_reason(handle, "1 of 2 nodes have fetched")
                assert not workers()
            finally:
                slow.wire.release()
            assert len(handle.result(timeout=SECONDS)) == 6


def test_a_provider_that_cannot_fetch_fails_the_job_with_the_reason(
    server: LoopbackServer, tmp_path: Path
) -> None:
    with providers(server, tmp_path, "able", "unable") as (able, unable):
        unable.wire.refuse["GET /api/artifacts/"] = 404
        with (
            server.submit(min_providers=2) as handle,
            pytest.raises(JobEndedError, match=r"\(unable\): refused with 404"),
        ):
            handle.result(timeout=SECONDS)
        assert not any("starts training" in line for line in able.announced)


def test_routes_are_checked_again_before_another_offer(server: LoopbackServer, tmp_path: Path) -> None:
    with providers(server, tmp_path, "forgotten") as (again,):
        trips = (RelayTrip(relay="r", seconds=0.5),)
        again.provider.check_routes = lambda offer: offer.model_copy(update={"relay_trips": trips})
        server.running.server.provider_service.leave(again.provider.id, "forgotten")
        again.wait_for("the server answers again")
        assert server.provider("forgotten").offer.relay_trips == trips
