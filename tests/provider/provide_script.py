"""A server with a long job and ``provide`` in one process: ``provide_script.py FOLDER``.

Prints the lines of ``provide``, and the process id of the worker once it trains.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil
from loopback_server import SECONDS, loopback_server

from ravnest.provider.provide import provide
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobView


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(folder: Path) -> None:
    with loopback_server(folder) as server, server.submit(epochs=10**6) as handle:

        def on_change(view: JobView) -> None:
            if view.progress.updates:
                say(f"worker {psutil.Process().children()[0].pid}")
                raise StopIteration

        def watch() -> None:
            try:
                handle.wait(SECONDS, on_change)
            except StopIteration:
                return

        threading.Thread(target=watch, daemon=True).start()
        token = server.running.token(ApiRole.PROVIDER)
        provide(server.url, token, name="attic", ram=0.5, cores=1, folder=folder / "provider", say=say)
        say(f"left: {server.provider('attic').reason}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
