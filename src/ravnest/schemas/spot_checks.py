"""Files of spot checks that providers upload."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ravnest.schemas.base import Artifact, Schema
from ravnest.schemas.checkpoints import Number
from ravnest.types import MicrobatchId

MOST_CHECKS = 4
"""Files of checks that a report names, the newest ones."""


class CheckEvidence(Schema):
    """File for a spot check that the provider has uploaded."""

    check: Annotated[str, Field(pattern=r"^[0-9a-z]{1,32}$")]
    """Random name of the check."""
    part: Literal["received", "stated"]
    """``received``: the output of the previous stage. ``stated``: inputs and weights of the own one."""
    phase: Number
    index: Number
    """Micro-batch of the phase."""
    file: Artifact

    @property
    def microbatch(self) -> MicrobatchId:
        """The micro-batch whose output is checked."""
        return MicrobatchId(self.phase, self.index)
