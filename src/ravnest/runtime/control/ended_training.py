"""Mark on the Root's disk: all clusters have the result of a training, and none has to wait any more."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from ravnest.store.files import write_atomically

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndedTraining:
    """File with the run and the phase in which training ended.

    A Root that is started again while it saves the result finds it, and does not wait for clusters that
    have ended meanwhile. Without the file it waits as long as for any lost cluster.
    """

    path: Path

    def covers(self, run: str, phases: int) -> bool:
        """Return whether the training of a run that ended with this many phases is over."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(found == {"run": run, "phases": phases})

    def write(self, run: str, phases: int) -> None:
        """Note the end; if that is not possible, training still ends."""
        text = json.dumps({"run": run, "phases": phases})
        try:
            write_atomically(self.path, lambda target: target.write_text(text, encoding="utf-8"))
        except OSError as error:
            logger.info("the end of training cannot be noted: %s", error)
