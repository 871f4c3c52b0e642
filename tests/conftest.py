"""Settings and fixtures for all tests."""

import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from job_server import JobServer, job_server

# torch logs every capture in detail when log records are captured, which pytest does.
logging.getLogger("torch.__trace").disabled = True
torch.set_num_threads(1)
# Some virtual machines report AMX and end a process that uses it for bfloat16; see ravnest.host.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

settings.register_profile("short", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("full", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Have the same examples in every run of ``make test``; ``make test-full`` has more, at random."""
    settings.load_profile("short" if config.option.markexpr else "full")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that all workers end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    """A real server for all tests that need one; tests use the fixture ``server``."""
    with job_server(tmp_path_factory.mktemp("job-server")) as running:
        yield running
