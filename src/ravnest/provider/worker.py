"""The worker of a provider: ``python -I -m ravnest.provider.worker FOLDER``.

Trains one node by the ``assignment.json`` of its folder. All that it gets of the requester is data:
a graph of known operators, tensors, and names of optimizers, schedulers and losses. It ends with 0,
or with 1 and one line on stderr that says why.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from ravnest.errors import RavnestError
from ravnest.provider.job_dir import JobDir
from ravnest.provider.limits import confine, limit_memory
from ravnest.provider.training import train, warm_up
from ravnest.store.files import write_json

logger = logging.getLogger(__name__)


def work(folder: str) -> int:
    """Train in a process that is confined already; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    place = JobDir(Path(folder))
    settings = place.read_settings()
    try:
        warm_up(settings.cores)
        write_json(place.idle, limit_memory(settings.ram))
        train(place, settings)
    except KeyboardInterrupt:
        return _failed("it was stopped")
    except RavnestError as error:
        return _failed(str(error))
    except Exception as error:
        logger.exception("the worker failed")
        return _failed(_reason(error, settings.ram / 1e9))
    return 0


def _reason(error: Exception, ram: float) -> str:
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return f"training needs more than the {ram:.2f} GB that are offered: {error}"
    return f"{type(error).__name__}: {error}"


def _failed(reason: str) -> int:
    sys.stderr.write(" ".join(reason.split()) + "\n")
    return 1


if __name__ == "__main__":
    confine()
    sys.exit(work(sys.argv[1]))
