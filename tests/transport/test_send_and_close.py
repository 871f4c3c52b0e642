"""The last message of a link reaches a peer whose network is away for a while."""

from __future__ import annotations

from typing import Any

import pytest

from ravnest.transport.base import send_and_close
from ravnest.wire.messages import Goodbye


class RecordedLink:
    """Link that writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def send(self, message: Any) -> None:
        self.calls.append(message.head)

    def flush(self, timeout: float) -> bool:
        self.calls.append(timeout)
        return True

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize(
    ("last", "patience", "calls"),
    [
        (Goodbye(1), 60.0, [Goodbye(1), 60.0, "close"]),
        (Goodbye(1), 0.0, [Goodbye(1), "close"]),
        (None, 60.0, ["close"]),
    ],
)
def test_a_link_closes_after_its_peer_has_the_last_message(
    last: Goodbye | None, patience: float, calls: list[Any]
) -> None:
    link: Any = RecordedLink()
    send_and_close(link, last, patience)
    assert link.calls == calls
