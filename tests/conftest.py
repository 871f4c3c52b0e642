"""Settings and fixtures for all tests."""

import logging
from collections.abc import Iterator

import pytest
import torch
from job_server import JobServer, job_server

# torch logs every capture in detail when log records are captured, which pytest does.
logging.getLogger("torch.__trace").disabled = True
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    """A real server for all tests that need one; tests use the fixture ``server``."""
    with job_server(tmp_path_factory.mktemp("job-server")) as running:
        yield running
