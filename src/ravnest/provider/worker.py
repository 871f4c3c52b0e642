"""Program of the worker process; ``worker_process.py`` starts it.

Trains one node by the ``assignment.json`` of its folder. Everything that comes from the requester is
data: a graph of known operators, tensors, and names of optimizers, schedulers and losses.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from ravnest.errors import RavnestError
from ravnest.provider.failure import EXIT_CODES, cause_of
from ravnest.provider.job_dir import JobDir
from ravnest.provider.limits import limit_files, limit_memory
from ravnest.provider.record_pipe import record_writer
from ravnest.provider.training import train, warm_up
from ravnest.runtime.machine_failures import is_out_of_memory
from ravnest.store.files import write_json
from ravnest.transport.tls_rejections import write_rejections

logger = logging.getLogger(__name__)


def work(folder: str, records: int | None = None) -> int:
    """Train in a process that is confined already and return its exit code.

    ``records`` is the descriptor to which telemetry records are written. If training fails, the last
    line on stderr says why, and the exit code says if it would fail elsewhere too.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    write_rejections(sys.stderr)  # the agent counts these lines
    job_dir = JobDir(Path(folder))
    settings = job_dir.read_settings()
    try:
        with record_writer(records) as sink:
            warm_up(settings.cores)
            limit_files(settings.disk)
            write_json(job_dir.idle, limit_memory(settings.ram))
            train(job_dir, settings, sink)
    except KeyboardInterrupt as error:
        return _failed("it was stopped", error)
    except RavnestError as error:
        return _failed(str(error), error)
    except Exception as error:
        logger.exception("the worker failed")
        return _failed(_reason(error, settings.ram / 1e9), error)
    return 0


def _reason(error: Exception, ram: float) -> str:
    if is_out_of_memory(error):
        return f"training needs more than the {ram:.2f} GB that are offered: {error}"
    return f"{type(error).__name__}: {error}"


def _failed(reason: str, error: BaseException) -> int:
    sys.stderr.write(" ".join(reason.split()) + "\n")
    return EXIT_CODES[cause_of(error)]
