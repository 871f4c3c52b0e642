"""Folders that are checked before work begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ravnest.errors import RavnestError
from ravnest.host import explained


class FolderError(RavnestError, ValueError):
    """Nothing can be written to a folder."""


def check_writable(folder: Path) -> None:
    """Raise ``FolderError`` if files cannot be written to a folder, which need not exist yet."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise FolderError(f"{existing} is a file: choose another folder with --out")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        cause = explained(OSError(error.errno, error.strerror))
        raise FolderError(f"the model could not be written to {folder}: {cause}") from error
