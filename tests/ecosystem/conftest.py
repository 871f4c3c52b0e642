"""A server and its providers as processes, for one test or for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world for all tests of a module, which add their own server and providers."""
    with World(tmp_path_factory.mktemp("world")) as made:
        yield made
