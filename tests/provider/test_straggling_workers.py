"""A provider whose machine becomes slow in mid-run gets fewer layers, with real worker processes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from loopback_server import loopback_server
from running_providers import providers, workers
from torch import nn
from torch.utils.data import TensorDataset

from ravnest.client.handle import JobHandle
from ravnest.schemas.jobs import JobView
from ravnest.server import job_pace, plan_review
from ravnest.server.scheduling import improvement, stragglers

SECONDS = 600.0
LAYERS, WIDTH, BATCH = 8, 768, 64
EPOCHS, BATCHES = 40, 40
EAGER = {"improvement_check": 1.0, "improvement_pause": 2.0, "checkpoint_upload": 2.0}
RUNS, STANDS = 0.002, 0.006
"""Seconds for which the slow machine computes, and for which other work then keeps it from that."""


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find stragglers, and let a new plan pay, after seconds instead of minutes."""
    monkeypatch.setattr(stragglers, "WARM_UP", 2.0)
    monkeypatch.setattr(stragglers, "WINDOW", 15.0)
    monkeypatch.setattr(stragglers, "LEAST_RECORDS", 5)
    monkeypatch.setattr(job_pace, "_LEAST_SPAN", 3.0)
    monkeypatch.setattr(plan_review, "RESTART", 0.0)
    monkeypatch.setattr(improvement, "PAYBACK", 0.0)
    monkeypatch.setattr(improvement, "PAYS", 0.0)


def deep_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(4, WIDTH), *hidden, nn.Linear(WIDTH, 3))


@contextmanager
def busy_machine(folder: Path) -> Iterator[None]:
    """Give the workers with jobs in ``folder`` a quarter of the time of their processor."""
    ended = threading.Event()

    def found() -> list[int]:
        return [each.pid for each in workers() if str(folder) in " ".join(each.cmdline())]

    def send(pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def slow_down() -> None:
        while not ended.is_set():
            pids, until = found(), time.monotonic() + 1.0  # a new plan starts other workers
            while time.monotonic() < until and not ended.wait(RUNS):
                send(pids, signal.SIGSTOP)
                time.sleep(STANDS)
                send(pids, signal.SIGCONT)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def units_of(view: JobView) -> dict[str, int]:
    """Return the number of layers in each provider's stage, by the plan in words."""
    units = re.findall(r"\((\d+) units?\)", view.plan)
    stages = sorted(view.assignments, key=lambda each: each.stage or 0)
    return {each.provider_name: int(number) for each, number in zip(stages, units, strict=True)}


def wait_until(handle: JobHandle, holds: Callable[[JobView], bool]) -> None:
    def on_change(view: JobView) -> None:
        if holds(view):
            raise StopIteration

    try:
        handle.wait(SECONDS, on_change)
    except StopIteration:
        return
    raise AssertionError([each.reason for each in handle.events()])


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("short_windows")
def test_a_provider_that_becomes_slow_gets_fewer_layers(tmp_path: Path) -> None:
    inputs = torch.randn(BATCHES * BATCH, 4, generator=torch.Generator().manual_seed(1))
    with (
        loopback_server(tmp_path / "server", changes=EAGER) as server,
        providers(server, tmp_path, "steady", "busy"),
        server.submit(
            model=deep_model(),
            example_args=(inputs[:BATCH],),
            train_data=TensorDataset(inputs, inputs[:, :3].argmax(1)),
            val_data=None,
            optimizer_params={"lr": 0.02},
            batch_size=BATCH,
            micro_batches=4,
            min_providers=2,
            epochs=EPOCHS,
        ) as handle,
    ):

        def is_measured(_: JobView) -> bool:
            with server.running.server.db.read() as db:
                found = db.stage_times.of_job(handle.id)
            return bool(found) and all(each.baseline > 0 for each in found)

        wait_until(handle, is_measured)
        before = units_of(handle.view())
        with busy_machine(tmp_path / "busy"):
            wait_until(handle, lambda view: view.state == "training" and units_of(view) != before)
        after = units_of(handle.view())
        assert sum(after.values()) == sum(before.values())
        assert after["busy"] < before["busy"], (before, after)
        handle.result(timeout=SECONDS)
        assert list(handle.losses().updates) == list(range(EPOCHS * BATCHES))
        said = [each.reason for each in handle.events() if each.kind == "recovery"]
        assert any("planned anew" in each and "the stage of busy takes" in each for each in said), said
