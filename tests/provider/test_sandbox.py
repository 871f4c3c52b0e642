"""Real processes that try to leave the sandbox of a worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ravnest.host import SIGNALLED
from ravnest.provider.sandbox import landlock
from ravnest.provider.sandbox.choice import Sandbox, usable_sandbox
from ravnest.provider.sandbox.entry import entry_order
from ravnest.provider.sandbox.network_policy import NetworkPolicy, dialled
from ravnest.provider.sandbox.policy import FilePolicy
from ravnest.provider.sandbox.socket_broker import SocketBroker
from ravnest.types import Address

SOURCE = str(Path(__file__).parents[2] / "src")
SECONDS = 60
FOUND = usable_sandbox("landlock")
WRAPPED = usable_sandbox("bwrap")
pytestmark = pytest.mark.skipif(isinstance(FOUND, str), reason=f"no sandbox here: {FOUND}")
needs_bubblewrap = pytest.mark.skipif(
    isinstance(WRAPPED, str), reason=f"no sandbox with bubblewrap here: {WRAPPED}"
)


def sandboxes() -> list[Any]:
    """Return the sandboxes to test: what old and new kernels have, and bubblewrap."""
    wrapped = pytest.param(WRAPPED, id="bwrap", marks=needs_bubblewrap)
    if isinstance(FOUND, str):
        return [pytest.param(FOUND, id="landlock"), wrapped]
    versions = sorted({landlock.OLDEST, FOUND.version})
    return [
        *(pytest.param(replace(FOUND, version=each), id=f"landlock {each}") for each in versions),
        wrapped,
    ]


BOOT = f"""
import ctypes, errno, json, os, socket, struct, subprocess, sys, threading
sys.path.insert(0, {SOURCE!r})
from ravnest.provider.sandbox.entry import enter_sandbox
libc = ctypes.CDLL(None, use_errno=True)
case = json.loads(sys.argv[3])
enter_sandbox(sys.argv[1], int(sys.argv[2]))

def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""


@dataclass
class Place:
    """Folders and listeners of a test: what the process may use, and what it may not."""

    home: Path
    job: Path
    other_job: Path
    peer: socket.socket
    stranger: socket.socket

    @property
    def case(self) -> dict[str, object]:
        return {
            "home": str(self.home),
            "job": str(self.job),
            "other_job": str(self.other_job),
            "peer": self.peer.getsockname()[1],
            "stranger": self.stranger.getsockname()[1],
            "agent": os.getpid(),
            "test": __file__,
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("owner")
    job, other_job = home / "jobs" / "job-1", home / "jobs" / "job-2"
    for folder in (job / "scratch", job / "node_data", other_job):
        folder.mkdir(parents=True)
    (home / "secret.txt").write_text("secret")
    (home / "servers.json").write_text("credential")
    (other_job / "weights").write_text("weights")
    (job / "node_data" / "stage").write_text("stage")
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.create_server(("", 0)) as stranger:
        yield Place(home, job, other_job, peer, stranger)


def started(
    place: Place, script: str, sandbox: Sandbox, *, port: int | None = None, boot: str = BOOT
) -> subprocess.Popen[str]:
    """Start a process that enters the sandbox of a worker and runs ``script``."""
    ours, theirs = socket.socketpair()
    policy = FilePolicy((str(place.job),), (str(place.job / "scratch"),))
    order = entry_order(policy, str(place.home), sandbox.version)
    arguments = [order, str(theirs.fileno()), json.dumps(place.case)]
    processes: list[subprocess.Popen[str]] = []

    def start(argv: list[str], descriptors: tuple[int, ...]) -> int:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), *descriptors),
            text=True,
        )
        processes.append(process)
        return process.pid

    argv = [sys.executable, "-I", "-c", boot + textwrap.dedent(script), *arguments]
    with theirs:
        pid = sandbox.launch(policy, str(place.job), argv, start)
    peers = dialled([Address("127.0.0.1", place.peer.getsockname()[1])])
    SocketBroker(pid, ours, sandbox.processor, NetworkPolicy(peers, port)).start()
    return processes[0]


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    return output


READS = {
    "a file of the owner": "open(case['home'] + '/secret.txt')",
    "the credential of the provider": "open(case['home'] + '/servers.json')",
    "the files of another job": "open(case['other_job'] + '/weights')",
    "the list of other jobs": "os.listdir(os.path.dirname(case['job']))",
    "the list of the owner's files": "os.listdir(case['home'])",
    "a file by way of /proc": "open('/proc/self/root' + case['home'] + '/secret.txt')",
    "the users of the machine": "open('/etc/passwd')",
    "the environment of the agent": "open(f\"/proc/{case['agent']}/environ\")",
    "the memory of the agent": "open(f\"/proc/{case['agent']}/mem\", 'rb')",
    "the list of processes": "os.listdir('/proc')",
    "the processes of control groups": "os.listdir('/sys/fs/cgroup')",
    "the connections of the machine": "open('/proc/self/net/tcp')",
    "a file by its handle": "call(304, -100, b'x' * 8, 0)",
}
WRITES = {
    "a new file of the owner": "open(case['home'] + '/new', 'w')",
    "a file of the owner": "open(case['home'] + '/secret.txt', 'w')",
    "the stage that was fetched": "open(case['job'] + '/node_data/stage', 'a')",
    "the mode of a file": "os.chmod(case['home'] + '/secret.txt', 0o777)",
    "the time of a file": "os.utime(case['home'] + '/secret.txt')",
    "the size of a file": "os.truncate(case['job'] + '/node_data/stage', 0)",
    "a file that is opened to be read": "os.open(case['job'] + '/node_data/stage', os.O_TRUNC)",
    "the end of a file": "os.unlink(case['job'] + '/node_data/stage')",
    "the place of a file": "os.rename(case['job'] + '/node_data/stage', case['job'] + '/scratch/stage')",
    "a link": "os.symlink(case['home'] + '/secret.txt', case['job'] + '/scratch/link')",
    "another name": "os.link(case['job'] + '/node_data/stage', case['job'] + '/scratch/name')",
    "a pipe": "os.mkfifo(case['job'] + '/scratch/pipe')",
    "the Python installation": "open(os.__file__, 'a')",
    "the module of the worker": "open(sys.modules['ravnest'].__file__, 'a')",
    "shared memory": "open('/dev/shm/ravnest-test', 'w')",
}
CONNECTIONS = {
    "a port that is no peer's": "socket.create_connection(('127.0.0.1', case['stranger']), 5)",
    "the same port by IPv6": "socket.create_connection(('::ffff:127.0.0.1', case['stranger']), 5)",
    "another address of the peer's port": "socket.create_connection(('127.0.0.2', case['peer']), 5)",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packets of the network card": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a Unix socket": "socket.socket(socket.AF_UNIX)",
    "an abstract Unix socket": "socket.socket(socket.AF_UNIX).connect('\\0ravnest')",
    "a virtual machine's host": "socket.socket(40, socket.SOCK_STREAM)",
    "multipath TCP": "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)",
    "a pair of datagram sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "the first data of a connection": (
        "socket.socket().sendto(b'x', socket.MSG_FASTOPEN, ('127.0.0.1', case['stranger']))"
    ),
    "a message that connects": (
        "socket.socket().sendmsg([b'x'], [], socket.MSG_FASTOPEN, ('127.0.0.1', case['stranger']))"
    ),
    "a listener at another port": "socket.socket().bind(('127.0.0.1', 1 + case['stranger'] % 60000))",
    "a listener at any port": "socket.socket().listen()",
    "a listener at a free port": "socket.create_server(('127.0.0.1', 0))",
}
PROCESSES = {
    "fork": "os.fork()",
    "a program": "subprocess.run(['/bin/true'])",
    "a program in this process": "os.execv('/bin/true', ['true'])",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "clone": "call(56, 17, 0, 0, 0, 0)",
    "clone3": "call(435, b'\\0' * 88, 88)",
    "a signal to the agent": "os.kill(case['agent'], 0)",
    "a signal to the process group": "os.kill(0, 0)",
    "a signal to everybody": "os.kill(-1, 0)",
    "a signal to a thread of the agent": "call(234, case['agent'], case['agent'], 0)",
    "a signal by a descriptor": "__import__('fcntl').fcntl(0, 8, case['agent'])",
    "a handle of the agent": "os.pidfd_open(case['agent'])",
    "ptrace": "call(101, 16, case['agent'], 0, 0)",
    "the memory of the agent": "call(310, case['agent'], 0, 0, 0, 0, 0)",
    "the limits of the agent": "call(302, case['agent'], 7, 0, 0)",
    "the cores of the agent": "os.sched_setaffinity(case['agent'], {0})",
    "another process group": "os.setpgid(0, 0)",
    "another session": "os.setsid()",
    "life after the agent": "call(157, 1, 0, 0, 0, 0)",
    "namespaces": "call(272, 0x10000000)",
    "mounts": "call(165, 0, 0, 0, 0, 0)",
    "another root": "os.chroot('/')",
    "shared memory of others": "call(29, 0, 4096, 0o1000)",
    "bpf": "call(321, 0, 0, 0)",
    "perf": "call(298, 0, 0, -1, -1, 0)",
    "keys": "call(250, 0, 0, 0, 0, 0)",
    "io_uring": "call(425, 8, b'\\0' * 120)",
    "userfaultfd": "call(323, 0)",
    "kernel modules": "call(175, 0, 0, 0)",
    "an anonymous file": "os.memfd_create('x')",
    "calls of another kind of processor": "call(0x40000000 | 39)",
}
ATTACKS = {
    f"{kind} {name}": code
    for kind, attacks in (
        ("read", READS),
        ("write", WRITES),
        ("connect", CONNECTIONS),
        ("process", PROCESSES),
    )
    for name, code in attacks.items()
}
REFUSALS = ("EACCES", "EPERM", "ENOSYS", "EAFNOSUPPORT")
"""Errors of the sandbox; others would be those of an attempt that could succeed."""
ABSENT = ("ENOENT", "EROFS", "EXDEV")
"""Further errors in bubblewrap, where what is attacked does not exist, or only to be read."""
ATTEMPT = """
results = {{}}
for name, code in json.loads({attacks!r}).items():
    try:
        eval(code)
        results[name] = ""
    except OSError as error:
        results[name] = errno.errorcode.get(error.errno, type(error).__name__)
print(json.dumps(results), flush=True)
"""


@pytest.fixture(scope="module", params=sandboxes())
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    found = request.param
    assert isinstance(found, Sandbox)
    return found


@pytest.fixture(scope="module")
def results(sandbox: Sandbox, place: Place) -> dict[str, str]:
    """Results of all attacks from inside one process."""
    script = ATTEMPT.format(attacks=json.dumps(ATTACKS))
    found: dict[str, str] = json.loads(output_of(started(place, script, sandbox)))
    return found


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of calls are those of x86_64")
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails(results: dict[str, str], sandbox: Sandbox, attack: str) -> None:
    refusals = (*REFUSALS, *ABSENT) if sandbox.kind == "bwrap" else REFUSALS
    assert results[attack] in refusals, f"{attack}: {results[attack] or 'succeeded'}"


def test_nothing_has_changed(results: dict[str, str], place: Place) -> None:
    assert results
    assert (place.home / "secret.txt").read_text() == "secret"
    assert (place.job / "node_data" / "stage").read_text() == "stage"
    assert sorted(path.name for path in place.home.iterdir()) == ["jobs", "secret.txt", "servers.json"]
    assert not list((place.job / "scratch").iterdir())
    place.stranger.setblocking(False)
    with pytest.raises(BlockingIOError):
        place.stranger.accept()


def test_the_work_of_a_worker_is_possible(place: Place, sandbox: Sandbox) -> None:
    """It reads its job, writes to its folders, starts threads, dials peers and listens at its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = f"""
        import pathlib, socket, tempfile, threading, time
        scratch = pathlib.Path(case["job"]) / "scratch"
        (scratch / "a").mkdir()
        (scratch / "b").mkdir()
        (scratch / "a" / "file").write_text("x" * 100)
        (scratch / "a" / "file").rename(scratch / "b" / "file")
        (scratch / "b" / "file").write_text("y")
        (scratch / "b" / "file").unlink()
        (scratch / "a").rmdir()
        (scratch / "b").rmdir()
        assert open(case["job"] + "/node_data/stage").read() == "stage"
        assert open(f"/proc/{{os.getpid()}}/statm").read()
        left, right = socket.socketpair()
        thread = threading.Thread(target=left.send, args=(b"x",))
        thread.start()
        assert right.recv(1) == b"x"
        socket.create_connection(("127.0.0.1", case["peer"]), 5).close()
        server = socket.create_server(("127.0.0.1", {port}))
        print("listens", flush=True)
        server.accept()[0].send(b"hello")
        os.kill(os.getpid(), 0)
    """
    process = started(place, script, sandbox, port=port)
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    with socket.create_connection(("127.0.0.1", port), SECONDS) as caller:
        assert caller.recv(8) == b"hello"
    output_of(process)
    connection, _ = place.peer.accept()
    connection.close()


def test_an_address_that_changes_while_it_is_checked_is_not_dialled(
    place: Place, sandbox: Sandbox
) -> None:
    """Another thread writes a stranger's port over the address all the time."""
    script = """
        import ctypes, struct
        good, bad = case["peer"], case["stranger"]
        address = (ctypes.c_char * 16)(*struct.pack("=H", 2), *bytes(14))
        address[4:8] = bytes([127, 0, 0, 1])
        over = threading.Event()
        def flip():
            while not over.is_set():
                for port in (good, bad):
                    address[2:4] = struct.pack("!H", port)
        thread = threading.Thread(target=flip)
        thread.start()
        reached, refused = set(), 0
        for _ in range(300):
            with socket.socket() as own:
                own.setblocking(False)
                libc.connect(own.fileno(), address, 16)
                number = ctypes.get_errno()
                if number in (0, errno.EINPROGRESS):
                    with __import__("contextlib").suppress(OSError):
                        reached.add(own.getpeername()[1])
                refused += number == errno.EACCES
        over.set()
        thread.join()
        print(json.dumps([sorted(reached), refused]))
    """
    reached, refused = json.loads(output_of(started(place, script, sandbox)))
    place.peer.setblocking(False)
    with suppress(BlockingIOError):
        while True:  # connections that wait would fill its queue
            place.peer.accept()[0].close()
    place.peer.setblocking(True)
    assert reached == [place.peer.getsockname()[1]]
    assert refused
    place.stranger.setblocking(False)
    with pytest.raises(BlockingIOError):
        place.stranger.accept()


def test_numbers_that_no_call_can_have_do_not_end_the_broker(place: Place, sandbox: Sandbox) -> None:
    """The broker reads the address where the worker says it is, and hands its fields to calls."""
    script = """
        import ctypes, struct
        far = struct.pack("=H", 10) + struct.pack("!HI", case["peer"], 0xFFFFFFFF)
        far += bytes(10) + b"\\xff\\xff\\x7f\\0\\0\\1" + struct.pack("=I", 0)
        numbers = []
        for family, address in ((2, ctypes.c_uint64(2**64 - 1)), (10, far)):
            with socket.socket(family) as own:
                own.setblocking(False)
                libc.connect(own.fileno(), address, len(far))
                numbers.append(errno.errorcode[ctypes.get_errno()])
        own = socket.socket()
        own.setblocking(False)
        own.connect_ex(("127.0.0.1", case["peer"]))
        own.setblocking(True)
        print(json.dumps([numbers, own.getpeername()[1]]))
    """
    numbers, peer = json.loads(output_of(started(place, script, sandbox)))
    place.peer.accept()[0].close()
    assert numbers == ["EINVAL", "EINVAL"]
    assert peer == place.peer.getsockname()[1]


SIGHTS = {
    "a file of the owner": "os.stat(case['home'] + '/secret.txt')",
    "a folder of another job": "os.stat(case['other_job'])",
    "the users of the machine": "os.stat('/etc/passwd')",
    "the file of a test": "os.stat(case['test'])",
    "the agent": "os.stat(f\"/proc/{case['agent']}\")",
    "the first process of the machine": "os.stat('/proc/2')",
    "a file of the agent": "os.stat(f\"/proc/{case['agent']}/cwd\")",
}


@needs_bubblewrap
def test_nothing_outside_of_bubblewrap_exists(place: Place) -> None:
    """Paths of the owner that a worker guesses, and processes of others, cannot be told from none."""
    assert isinstance(WRAPPED, Sandbox)
    script = ATTEMPT.format(attacks=json.dumps(SIGHTS)) + (
        "print(json.dumps([os.getpid(), os.getppid(), socket.gethostname(), os.listdir(case['job'])]))"
    )
    first, second = output_of(started(place, script, WRAPPED)).splitlines()
    assert set(json.loads(first).values()) == {"ENOENT"}, first
    pid, parent, host, files = json.loads(second)
    assert (pid, parent, host) == (1, 0, "worker")
    assert sorted(files) == ["node_data", "scratch"]


@needs_bubblewrap
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_worker_in_bubblewrap(place: Place, number: signal.Signals) -> None:
    """The system spares the first process of a namespace from signals that it does not handle."""
    assert isinstance(WRAPPED, Sandbox)
    boot = BOOT.replace("sandbox.entry import enter_sandbox", "limits import confine as enter_sandbox")
    process = started(place, "print('runs', flush=True)\nthreading.Event().wait()", WRAPPED, boot=boot)
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    (inner,) = psutil.Process(process.pid).children()
    inner.send_signal(number)
    assert process.wait(SECONDS) == SIGNALLED + number
    process.communicate()


@needs_bubblewrap
def test_a_worker_in_bubblewrap_ends_with_the_program_that_started_it(place: Place) -> None:
    assert isinstance(WRAPPED, Sandbox)
    script = "print('runs', flush=True)\nthreading.Event().wait()"
    process = started(place, script, WRAPPED)
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    (inner,) = psutil.Process(process.pid).children()
    process.kill()
    assert psutil.wait_procs([inner], SECONDS)[0] == [inner]
    process.communicate()
