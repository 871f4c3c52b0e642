"""Stages of the best model so far, at the Root of a cluster: replaced as a whole, with a description.

The stages are received in a folder of their own and take the place of the earlier ones when all of them
are there. The description is written last.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ravnest.errors import StageFormatError
from ravnest.store.files import convert, has_format, read_json, write_json

FORMAT = "ravnest-best-model"
VERSION = 1
BEST = "best"
"""Folder of the best models, in that of the trained stages."""
_LIMIT = 1 << 16


class BestModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of the best model of a cluster."""

    run: str
    epoch: int
    """Epochs of training that it contains."""
    metric: str
    """Metric by which it is the best one."""
    value: float


@dataclass(frozen=True)
class BestModelFolder:
    """Folder of the best model of one cluster."""

    folder: Path
    """Folder of trained stages."""
    cluster: int

    @property
    def incoming(self) -> Path:
        """Folder in which the stages of the next best model are received, as trained stages."""
        return self.folder / BEST / "incoming"

    @property
    def stages(self) -> Path:
        """Folder of the stages."""
        return self.folder / BEST / f"cluster_{self.cluster}"

    @property
    def _description(self) -> Path:
        return self.folder / BEST / f"cluster_{self.cluster}.json"

    def replace(self, best: BestModel) -> None:
        """Make the received stages the best model."""
        self._description.unlink(missing_ok=True)
        shutil.rmtree(self.stages, ignore_errors=True)
        (self.incoming / self.stages.name).replace(self.stages)
        data = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(best)}
        write_json(self._description, data)

    def read(self) -> BestModel | None:
        """Return the description; ``None`` if there is no best model, or its description is damaged."""
        try:
            data = read_json(self._description, _LIMIT)
            if not has_format(data, FORMAT, VERSION):
                return None
            plain = {name: value for name, value in data.items() if name not in ("format", "version")}
            return convert(plain, BestModel, self._description)
        except (OSError, StageFormatError):
            return None
