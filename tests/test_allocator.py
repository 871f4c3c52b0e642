"""Settings of the memory allocator: mapped blocks take precedence over kept memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ravnest import host

TRIM, MMAP, ARENAS = -1, -3, -8


class RecordingLibc:
    """C library that records the settings of its allocator."""

    def __init__(self) -> None:
        self.settings: dict[int, int] = {}

    def mallopt(self, setting: int, value: int) -> int:
        """Set an option of the allocator."""
        self.settings[setting] = value
        return 1


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingLibc]:
    """Replace the C library; forget which settings were made."""
    functions = (host.map_large_blocks, host.keep_freed_memory)
    recording = RecordingLibc()
    monkeypatch.setattr(host, "_libc", recording)
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for function in functions:
        function.cache_clear()
    yield recording
    for function in functions:
        function.cache_clear()


def test_freed_memory_is_kept_by_default(libc: RecordingLibc) -> None:
    host.keep_freed_memory()
    assert libc.settings[MMAP] == libc.settings[TRIM] == 32 << 20
    assert libc.settings[ARENAS] == 2


@pytest.mark.parametrize("mapped_first", [True, False])
def test_mapped_blocks_take_precedence(libc: RecordingLibc, mapped_first: bool) -> None:
    order = [host.map_large_blocks, host.keep_freed_memory]
    for function in order if mapped_first else reversed(order):
        function()
    assert libc.settings[MMAP] == libc.settings[TRIM] == 256 << 10
    assert libc.settings[ARENAS] == 2


def test_settings_of_the_user_are_not_changed(
    libc: RecordingLibc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    host.keep_freed_memory()
    assert libc.settings == {}


def test_blocks_are_mapped_for_a_while(libc: RecordingLibc) -> None:
    with host.large_blocks_mapped():
        assert libc.settings == {MMAP: 256 << 10, TRIM: 256 << 10}
    assert libc.settings == {MMAP: 32 << 20, TRIM: 32 << 20}


def test_blocks_stay_mapped_where_memory_is_short(libc: RecordingLibc) -> None:
    host.map_large_blocks()
    with host.large_blocks_mapped():
        pass
    assert libc.settings[MMAP] == libc.settings[TRIM] == 256 << 10


def test_a_configured_allocator_is_not_changed_for_a_while(
    libc: RecordingLibc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    with host.large_blocks_mapped():
        assert libc.settings == {}
