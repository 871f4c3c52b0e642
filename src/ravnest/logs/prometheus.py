"""Figures in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """A value with the labels that tell it from the others of its name."""

    labels: Mapping[str, str]
    value: float


class Figure(NamedTuple):
    """A figure with all its samples. Counters only grow."""

    name: str
    kind: str
    help: str
    samples: Sequence[Sample]


def exposition(found: Iterable[Figure]) -> str:
    """Return the figures as text."""
    lines = []
    for figure in found:
        lines += [
            f"# HELP {figure.name} {figure.help}",
            f"# TYPE {figure.name} {figure.kind}",
            *(f"{figure.name}{_shown(sample.labels)} {sample.value:.17g}" for sample in figure.samples),
        ]
    return "\n".join([*lines, ""])


def _shown(labels: Mapping[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
