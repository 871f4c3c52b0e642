"""Writing that either happens or does not, and reading that trusts nothing."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from ravnest.errors import StageFormatError

_CHUNK = 4 << 20


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` on a new file beside ``path``, then put it in place of ``path``.

    Its mode is the one that the umask gives to new files, whichever way ``write`` opens it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    temporary.touch(exist_ok=False)
    mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: object, *, compact: bool = False) -> None:
    """Write JSON atomically, for people (indented) or for machines (compact)."""
    separators, indent = ((",", ":"), None) if compact else ((",", ": "), 2)
    text = json.dumps(data, indent=indent, separators=separators, allow_nan=False) + "\n"
    write_atomically(path, lambda target: _write_text(target, text))


def read_json(path: Path, limit: int) -> Any:
    """Read JSON of at most ``limit`` bytes; ``StageFormatError`` for anything else."""
    size = size_of(path)
    if size > limit:
        raise StageFormatError(f"{path} has {size} bytes, more than the {limit} that are allowed")
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise StageFormatError(f"{path} is not valid JSON: {error}") from error


def inside(name: str) -> str:
    """The name itself, if it stays below the folder that it is joined to."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise StageFormatError(f"{name} leads out of its folder")
    return name


def size_of(path: Path) -> int:
    """Bytes of a regular file; ``StageFormatError`` for a pipe, a device, a folder or nothing."""
    try:
        status = path.stat()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"fails: {error.strerror}"
        raise StageFormatError(f"{path} {reason}") from None
    if not stat.S_ISREG(status.st_mode):
        raise StageFormatError(f"{path} is not a file")
    return status.st_size


def sha256_of(path: Path) -> str:
    """Digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
