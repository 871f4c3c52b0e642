"""Small values that several layers share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a provider does in its cluster; it follows from its position in the pipeline."""

    ROOT = "Root"
    STEM = "Stem"
    LEAF = "Leaf"

    @classmethod
    def at(cls, position: int, count: int) -> Role:
        """Role of the stage at ``position`` of ``count``; a cluster of one node has a Root only."""
        if position == 0:
            return cls.ROOT
        return cls.LEAF if position == count - 1 else cls.STEM


@dataclass(frozen=True, order=True)
class Address:
    """Where a node can be reached."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
