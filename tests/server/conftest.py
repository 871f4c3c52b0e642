from collections.abc import Iterator
from pathlib import Path

import pytest
from server_cases import Case, opened


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with opened(tmp_path / "server") as found:
        yield found
