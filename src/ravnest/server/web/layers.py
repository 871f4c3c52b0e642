"""Layers of a stage, read from the header of its weights."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LONGEST_HEADER = 64 << 20


@dataclass(frozen=True)
class StageLayers:
    """Layers whose weights a stage has."""

    words: str
    """Their names, such as ``embed, blocks.0–3``."""
    parameters: int
    """Numbers in all tensors."""


@functools.lru_cache(maxsize=2000)
def stage_layers(path: Path) -> StageLayers | None:
    """Return the layers of a stage's weights; ``None`` if the file is gone or has none.

    Artifacts have the digests of their contents as names, so that an answer stays right.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if 0 < size <= _LONGEST_HEADER else {}
        shapes = {name: each["shape"] for name, each in header.items() if name != "__metadata__"}
        parameters = sum(math.prod(shape) for shape in shapes.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return StageLayers(layer_words(shapes), parameters) if shapes else None


def layer_words(tensors: Iterable[str]) -> str:
    """Return the layers of tensors: without number as they are, numbered ones as ranges."""
    plain: dict[str, None] = {}
    numbered: dict[str, set[int]] = {}
    for name in tensors:
        parts = name.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if index is None:
            plain[".".join(parts[:-1]) or name] = None
        else:
            numbered.setdefault(".".join(parts[:index]), set()).add(int(parts[index]))
    ranges = [f"{stem}.{_range(found)}".lstrip(".") for stem, found in sorted(numbered.items())]
    return ", ".join([*sorted(plain), *ranges])


def _range(numbers: set[int]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first}–{last}"
