"""``provide`` in a process of its own, with a server inside: ``provide_script.py FOLDER``.

The server has a long job for it. Lines are written as ``provide`` says them, and the worker's process
when it trains.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil
from assigning_server import FakeServer, small_job

from ravnest.http import credentials
from ravnest.provider import provide
from ravnest.schemas.auth import ApiRole


def main(folder: Path) -> int:
    server = FakeServer()
    (only,) = small_job(server, folder / "job", nodes=1, epochs=10**6)
    server.want("attic", only.id)
    member = credentials.Membership("http://127.0.0.1:1", "m", ApiRole.PROVIDER, "secret", None, "attic")
    credentials.save(member, folder)
    credentials.Membership.api = lambda self: server.api()  # type: ignore[method-assign]

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def watch() -> None:
        server.wait(lambda: server.losses.get("attic"))
        say(f"worker {psutil.Process().children()[0].pid}")

    threading.Thread(target=watch, daemon=True).start()
    code = provide.provide(
        member.url,
        name="attic",
        ram=0.5,
        cores=1,
        listen=str(only.node_file["address"]),
        folder=folder / "provider",
        say=say,
    )
    sys.stdout.write(f"left {server.left}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
