"""Atomic writes, digests, and reading of files that are not trusted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeGuard, TypeVar

import msgspec

from ravnest.errors import StageFormatError
from ravnest.types import convert_checked

_CHUNK = 4 << 20
T = TypeVar("T")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a new file beside ``path``, then move that file to ``path``.

    The file gets the mode that the umask gives to new files, however ``write`` opens it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    temporary.touch(exist_ok=False)
    mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(
            PermissionError
        ):  # in the sandbox of a worker: it has the one of `write`
            temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: object, *, compact: bool = False) -> None:
    """Write JSON atomically, indented or compact."""
    separators, indent = ((",", ":"), None) if compact else ((",", ": "), 2)
    text = json.dumps(data, indent=indent, separators=separators, allow_nan=False) + "\n"
    write_atomically(path, lambda target: _write_text(target, text))


def read_json(path: Path, limit: int) -> object:
    """Read JSON of at most ``limit`` bytes; ``StageFormatError`` if the file is anything else."""
    size = size_of(path)
    if size > limit:
        raise StageFormatError(f"{path} has {size} bytes; at most {limit} are allowed")
    try:
        data: object = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise StageFormatError(f"{path} is not valid JSON: {error}") from error
    return data


def has_format(data: object, name: str, version: int) -> TypeGuard[dict[str, object]]:
    """Return True if ``data`` is a JSON object with this ``format`` and ``version``."""
    return isinstance(data, dict) and data.get("format") == name and data.get("version") == version


def convert(data: object, kind: type[T], path: Path | str) -> T:
    """Return JSON data as a value of type ``kind``.

    ``StageFormatError`` names ``path``, where the data comes from, and the field that does not fit.
    """
    try:
        return convert_checked(data, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise StageFormatError(f"{path} is malformed: {error}") from error


def inside(name: str) -> str:
    """Return ``name`` if it is a relative path that stays below its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise StageFormatError(f"{name} leads out of its folder")
    return name


def size_of(path: Path) -> int:
    """Return the size of a regular file; ``StageFormatError`` for anything else at ``path``."""
    try:
        status = path.stat()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "does not exist" if missing else f"cannot be read: {error.strerror}"
        raise StageFormatError(f"{path} {reason}") from None
    if not stat.S_ISREG(status.st_mode):
        raise StageFormatError(f"{path} is not a file")
    return status.st_size


def sha256_of(path: Path) -> str:
    """Return the SHA-256 digest of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
