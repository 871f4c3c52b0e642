"""Lines of control connections; bytes from strangers."""

from __future__ import annotations

from ravnest.errors import RelayError

_LONGEST_LINE = 200


class LineReader:
    """Collects lines from the pieces in which they arrive."""

    def __init__(self, first: bytes = b"") -> None:
        """``first``: bytes that were received already; the next ``feed`` returns their lines too."""
        self._received = first

    def feed(self, data: bytes) -> list[str]:
        """Return the complete lines, without line breaks; ``RelayError`` if these are none."""
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _LONGEST_LINE or any(len(line) > _LONGEST_LINE for line in lines):
            raise RelayError(f"a line of a control connection has more than {_LONGEST_LINE} bytes")
        try:
            return [line.decode("ascii") for line in lines]
        except UnicodeDecodeError:
            raise RelayError("a line of a control connection is not ASCII") from None
