"""Choice of a sandbox: what the owner wants, and what this system has."""

from __future__ import annotations

import functools
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from ravnest.errors import LaunchError, SettingsError
from ravnest.provider.sandbox import bubblewrap, kernel, landlock
from ravnest.provider.sandbox.entry import entry_order
from ravnest.provider.sandbox.network_policy import NetworkPolicy, dialled
from ravnest.provider.sandbox.policy import FilePolicy
from ravnest.provider.sandbox.socket_broker import SocketBroker
from ravnest.provider.sandbox.system_calls import PROCESSORS, Processor
from ravnest.schemas.providers import SandboxKind
from ravnest.types import Address

SandboxChoice = Literal["auto", "bwrap", "landlock", "off"]
CHOICES: tuple[SandboxChoice, ...] = get_args(SandboxChoice)

_TRIAL_SECONDS = 30.0
_TRIAL = (
    "import socket, sys\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from ravnest.provider.sandbox.entry import enter_sandbox\n"
    "enter_sandbox(sys.argv[2], int(sys.argv[3]))\n"
    "socket.create_connection(('127.0.0.1', int(sys.argv[4])), 10).close()\n"
    "try:\n"
    "    open(sys.argv[5])\n"
    "except (PermissionError, FileNotFoundError):\n"
    "    sys.exit(0)\n"
    "sys.exit('a file outside its folders could be read')\n"
)
"""Program that enters a sandbox, connects through the broker, and tries to read a file outside."""


@dataclass(frozen=True)
class Sandbox:
    """Sandbox of this system: Landlock, seccomp and a broker for sockets, within bubblewrap or not."""

    processor: Processor
    version: int
    """Version of Landlock to use."""
    wrapper: str | None = None
    """Path of bubblewrap; ``None`` if it is not used."""
    without: str = ""
    """Reason why bubblewrap is not used."""

    @property
    def kind(self) -> SandboxKind:
        """Its name in offers and on the command line."""
        return "landlock" if self.wrapper is None else "bwrap"

    def __str__(self) -> str:
        if self.wrapper is not None:
            return f"bubblewrap, Landlock {self.version} and seccomp"
        reason = f"; without bubblewrap: {self.without}" if self.without else ""
        return f"Landlock {self.version} and seccomp{reason}"

    def launch(
        self, policy: FilePolicy, folder: str, argv: Sequence[str], start: bubblewrap.Start
    ) -> int:
        """Start a process that will enter the sandbox; return its process id, as it is outside.

        With bubblewrap, ``start`` starts that program, and the process is its child.
        """
        if self.wrapper is None:
            return start(list(argv), ())
        home = str(Path.home())
        return bubblewrap.launched(self.wrapper, policy, home, folder, argv, start)


def find_sandbox() -> Sandbox | str:
    """Return the sandbox of this system, or the reason why it has none."""
    processor = PROCESSORS.get(platform.machine())
    if sys.platform != "linux":
        return f"there is none for {platform.system() or sys.platform}"
    if processor is None:
        return f"there is none for processors of the kind {platform.machine()}"
    version = kernel.landlock_version()
    if version < landlock.OLDEST:
        return f"it needs Landlock {landlock.OLDEST} or later, and this kernel has {version or 'none'}"
    if not kernel.can_ask():
        return "this kernel, or the container, does not permit filters of system calls (seccomp)"
    return Sandbox(processor, version)


@functools.cache
def usable_sandbox(choice: SandboxChoice = "auto") -> Sandbox | str:
    """Return the sandbox of this system after a trial, or the reason why it has none.

    Bubblewrap is used if it is installed and works; containers often forbid its namespaces.
    """
    found = find_sandbox()
    if isinstance(found, str):
        return found
    if choice != "landlock":
        inside = _in_bubblewrap(found)
        if isinstance(inside, Sandbox) or choice == "bwrap":
            return inside
        found = replace(found, without=inside)
    failure = tried(found)
    return f"its trial failed: {failure}" if failure else found


def _in_bubblewrap(sandbox: Sandbox) -> Sandbox | str:
    program = shutil.which(bubblewrap.PROGRAM)
    if program is None:
        return "it is not installed"
    inside = replace(sandbox, wrapper=str(Path(program).absolute()))
    failure = tried(inside)
    return f"its trial failed: {failure}" if failure else inside


def choose_sandbox(choice: SandboxChoice) -> Sandbox | None:
    """Return the sandbox that the owner wants; ``None`` for ``off``.

    ``SettingsError`` if this system has none: workers do not run without one unless the owner says so.
    """
    if choice not in CHOICES:
        raise SettingsError(f"the sandbox can be {', '.join(CHOICES)}, not {choice!r}")
    if choice == "off":
        return None
    found = usable_sandbox(choice)
    if isinstance(found, str) and choice == "bwrap":
        raise SettingsError(
            f"workers cannot run in bubblewrap: {found}. Install the package bubblewrap and permit user "
            "namespaces, or use the default, `--sandbox auto`"
        )
    if isinstance(found, str):
        raise SettingsError(
            f"this machine has no sandbox for workers: {found}. Jobs of others would run with all "
            "permissions of your user. Use Linux 5.19 or later with Landlock and seccomp, or, at your "
            "own risk, `--sandbox off`, best in a virtual machine or as a user without files"
        )
    return found


def tried(sandbox: Sandbox) -> str:
    """Start a process in the sandbox; return why that failed, or an empty string."""
    source = str(Path(__file__).parents[3])
    with (
        tempfile.TemporaryDirectory(prefix="ravnest-") as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        port = listener.getsockname()[1]
        secret = Path(folder) / "secret"
        secret.touch()
        inner = Path(folder) / "inner"
        inner.mkdir()
        policy = FilePolicy((), (str(inner),))
        order = entry_order(policy, str(Path.home()), sandbox.version)
        ours, theirs = socket.socketpair()
        started: list[subprocess.Popen[str]] = []

        def start(argv: list[str], descriptors: tuple[int, ...]) -> int:
            process = subprocess.Popen(  # noqa: S603 - our own program
                argv,
                pass_fds=(theirs.fileno(), *descriptors),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            return process.pid

        argv = [
            *(sys.executable, "-I", "-S", "-c", _TRIAL, source, order, str(theirs.fileno())),
            *(str(port), str(secret)),
        ]
        peers = dialled([Address("127.0.0.1", port)])
        try:
            with theirs:
                pid = sandbox.launch(policy, str(inner), argv, start)
            SocketBroker(pid, ours, sandbox.processor, NetworkPolicy(peers)).start()
        except (OSError, LaunchError, subprocess.SubprocessError) as error:
            ours.close()
            if not started:
                return str(error)
        (process,) = started
        try:
            _, errors = process.communicate(timeout=_TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"the trial did not end within {_TRIAL_SECONDS:.0f} s"
    if process.returncode == 0:
        return ""
    last = errors.strip().rpartition("\n")[2]
    return last[:500] or f"the trial ended with exit code {process.returncode}"
