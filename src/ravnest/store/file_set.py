"""Replacement of a set of files as a whole.

New files are written to a staging folder first. A journal then lists every move and removal. The next
call that finds a journal finishes it. After a crash the folder therefore holds the old set or, after
the next call, the new set, but never a permanent mixture.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ravnest.errors import StageFormatError
from ravnest.store.files import convert, inside, read_json, write_json

_JOURNAL = ".replacing.json"
_STAGING = ".ravnest-staging-"
_JOURNAL_LIMIT = 16 << 20


class _Journal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replacement that is ready to be carried out."""

    staging: str
    """Folder of the new files."""
    new: tuple[str, ...]
    """Files to move from the staging folder."""
    obsolete: tuple[str, ...]
    """Files to remove."""


class Replacement:
    """A set of files to put below ``folder`` together: write below ``staging``, then ``commit``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        finish_replacement(folder)
        self.staging = Path(tempfile.mkdtemp(dir=folder, prefix=_STAGING))

    def commit(self, old: Iterable[str]) -> None:
        """Move all staged files into place and remove the files of ``old`` that are not among them."""
        new = sorted(p.relative_to(self.staging).as_posix() for p in _files(self.staging))
        obsolete = sorted(set(old) - set(new))
        journal = _Journal(self.staging.name, tuple(new), tuple(obsolete))
        write_json(self._folder / _JOURNAL, msgspec.to_builtins(journal))
        finish_replacement(self._folder)
        for leftover in self._folder.glob(f"{_STAGING}*"):  # staging folders of killed processes
            shutil.rmtree(leftover, ignore_errors=True)

    def discard(self) -> None:
        """Remove the staged files and keep the old ones, unless a journal already lists them."""
        if not (self._folder / _JOURNAL).exists():
            shutil.rmtree(self.staging, ignore_errors=True)


def finish_replacement(folder: Path) -> None:
    """Carry out the journal of an interrupted replacement, if there is one."""
    path = folder / _JOURNAL
    if not path.exists():
        return
    journal = convert(read_json(path, _JOURNAL_LIMIT), _Journal, path)
    staging = folder / inside(journal.staging)
    if staging.parent != folder or not staging.name.startswith(_STAGING):
        raise StageFormatError(f"{path} does not name a staging folder; remove the file")
    for name in journal.new:
        source, target = staging / inside(name), folder / inside(name)
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
    for name in journal.obsolete:
        target = folder / inside(name)
        target.unlink(missing_ok=True)
        _remove_empty(target.parent, folder)
    shutil.rmtree(staging, ignore_errors=True)
    path.unlink()


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _remove_empty(folder: Path, top: Path) -> None:
    """Remove empty folders from ``folder`` upwards, up to but not including ``top``."""
    while folder != top:
        if folder.is_dir():
            if any(folder.iterdir()):
                return
            folder.rmdir()
        folder = folder.parent
