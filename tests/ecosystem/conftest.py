"""A server and its providers as processes, for one test or for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_command import CommandStarter
from world import World


@pytest.fixture(scope="session")
def starter() -> Iterator[CommandStarter]:
    """Process that has imported torch and forks the commands of the tests."""
    made = CommandStarter()
    yield made
    made.close()


@pytest.fixture
def world(tmp_path: Path, starter: CommandStarter) -> Iterator[World]:
    with World(tmp_path, starter) as made:
        yield made


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory, starter: CommandStarter) -> Iterator[World]:
    """A world for all tests of a module, which add their own server and providers."""
    with World(tmp_path_factory.mktemp("world"), starter) as made:
        yield made
