"""Replace a set of files as a whole.

New files are written aside first. A journal then lists every move and removal; whoever finds a
journal carries it out to the end. So a crash leaves either the old set or, after the next call, the
new one, never a mixture that stays.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ravnest.errors import StageFormatError
from ravnest.store.files import inside, read_json, write_json

_JOURNAL = ".replacing.json"
_STAGING = ".ravnest-staging-"
_JOURNAL_LIMIT = 16 << 20


class Replacement:
    """Files to be put below ``folder`` together. Write below ``staging``, then ``commit``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        finish_replacement(folder)
        self.staging = Path(tempfile.mkdtemp(dir=folder, prefix=_STAGING))

    def commit(self, old: Iterable[str]) -> None:
        """Put all staged files in place and remove those of ``old`` that are not among them."""
        new = sorted(p.relative_to(self.staging).as_posix() for p in _files(self.staging))
        obsolete = sorted(set(old) - set(new))
        journal = {"staging": self.staging.name, "new": new, "obsolete": obsolete}
        write_json(self._folder / _JOURNAL, journal)
        finish_replacement(self._folder)
        for leftover in self._folder.glob(f"{_STAGING}*"):  # of calls that were killed
            shutil.rmtree(leftover, ignore_errors=True)

    def discard(self) -> None:
        """Drop what was staged; the old files stay. What a journal promises is kept."""
        if not (self._folder / _JOURNAL).exists():
            shutil.rmtree(self.staging, ignore_errors=True)


def finish_replacement(folder: Path) -> None:
    """Carry out a journal that an interrupted replacement left; nothing to do is fine."""
    path = folder / _JOURNAL
    if not path.exists():
        return
    journal = read_json(path, _JOURNAL_LIMIT)
    staging = folder / inside(journal["staging"])
    if staging.parent != folder or not staging.name.startswith(_STAGING):
        raise StageFormatError(f"{path} does not name a folder of new files; remove it")
    for name in journal["new"]:
        source, target = staging / inside(name), folder / inside(name)
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
    for name in journal["obsolete"]:
        target = folder / inside(name)
        target.unlink(missing_ok=True)
        _remove_empty(target.parent, folder)
    shutil.rmtree(staging, ignore_errors=True)
    path.unlink()


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _remove_empty(folder: Path, top: Path) -> None:
    while folder != top:
        if folder.is_dir():
            if any(folder.iterdir()):
                return
            folder.rmdir()
        folder = folder.parent
