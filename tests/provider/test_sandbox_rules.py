"""Rules of a worker's sandbox: the program of the filter, addresses, folders, and which one is used."""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from node_files import node_file

from ravnest.errors import ServerUnreachableError, SettingsError
from ravnest.provider.provide import describe_sandbox, provide
from ravnest.provider.sandbox import bubblewrap, choice, kernel, landlock
from ravnest.provider.sandbox.choice import Sandbox, choose_sandbox, find_sandbox, usable_sandbox
from ravnest.provider.sandbox.filter_program import (
    ALLOW,
    ASK,
    KILL,
    REFUSE,
    Instruction,
    encoded,
    filter_program,
)
from ravnest.provider.sandbox.network_policy import NetworkPolicy, SocketPlace, dialled, parse_place
from ravnest.provider.sandbox.policy import PREFIX_PARTS, FilePolicy, python_folders
from ravnest.provider.sandbox.socket_broker import SocketBroker
from ravnest.provider.sandbox.system_calls import PROCESSORS, Processor
from ravnest.provider.sandbox.worker_network import (
    PeerUpdates,
    network_policy,
    peer_addresses,
    with_ip_addresses,
)
from ravnest.provider.sandbox.worker_rules import worker_rules
from ravnest.store.node_spec import NeighbourSpec, RelaySpec
from ravnest.types import Address

PID = 4711
SECONDS = 60


def result_of(program: Sequence[Instruction], architecture: int, call: int, *arguments: int) -> int:
    """Run a program as the kernel does."""
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("=iIQ6Q", call, architecture, 0, *padded)
    value = position = 0
    while True:
        step = program[position]
        position += 1
        match step.code:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, step.value)
            case 0x54:
                value &= step.value
            case 0x15:
                position += step.if_true if value == step.value else step.if_false
            case 0x06:
                return step.value
            case _:
                raise AssertionError(step)


@pytest.fixture(params=PROCESSORS, ids=str)
def processor(request: pytest.FixtureRequest) -> Processor:
    return PROCESSORS[request.param]


def decided(processor: Processor, name: str, *arguments: int) -> int:
    known = processor.permitted | processor.refused
    program = filter_program(processor, worker_rules(PID))
    return result_of(program, processor.architecture, known[name], *arguments)


def refused(number: int) -> int:
    return REFUSE | number


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("read", (), ALLOW),
        ("connect", (), ASK),
        ("bind", (), ASK),
        ("listen", (), ASK),
        ("socket", (2, 1 | 0o2000000 | 0o4000, 0), ALLOW),
        ("socket", (10, 1, 6), ALLOW),
        ("socket", (2, 2, 0), refused(errno.EAFNOSUPPORT)),
        ("socket", (1, 1, 0), refused(errno.EAFNOSUPPORT)),
        ("socket", (2, 1, 262), refused(errno.EAFNOSUPPORT)),
        ("sendto", (3, 0, 0, 0, 0), ALLOW),
        ("sendto", (3, 0, 0, 0, 0x7000), refused(errno.EPERM)),
        ("sendto", (3, 0, 0, 0, 0x700000000), refused(errno.EPERM)),
        ("sendmsg", (3, 0, 0x4000), ALLOW),
        ("sendmsg", (3, 0, 0x20004000), refused(errno.EPERM)),
        ("clone", (0x3D0F00,), ALLOW),
        ("clone", (17,), refused(errno.EPERM)),
        ("clone", (0x3D0F00 | 0x10000000,), refused(errno.EPERM)),
        ("kill", (PID, 9), ALLOW),
        ("kill", (PID + 1, 9), refused(errno.EPERM)),
        ("kill", (0, 9), refused(errno.EPERM)),
        ("kill", (0xFFFFFFFF, 9), refused(errno.EPERM)),
        ("tgkill", (PID, 1), ALLOW),
        ("prlimit64", (0,), ALLOW),
        ("prlimit64", (1,), refused(errno.EPERM)),
        ("openat", (0, 0, os.O_RDONLY), ALLOW),
        ("openat", (0, 0, os.O_RDWR | os.O_TRUNC | os.O_CREAT), ALLOW),
        ("openat", (0, 0, os.O_TRUNC), refused(errno.EPERM)),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), refused(errno.ENOTTY)),
        ("prctl", (15,), ALLOW),
        ("prctl", (4,), refused(errno.EPERM)),
        ("execve", (), refused(errno.EPERM)),
        ("ptrace", (), refused(errno.EPERM)),
    ],
)
def test_calls_are_decided_by_their_arguments(
    processor: Processor, name: str, arguments: tuple[int, ...], expected: int
) -> None:
    assert decided(processor, name, *arguments) == expected


def test_calls_that_are_not_listed_do_not_exist(processor: Processor) -> None:
    program = filter_program(processor, worker_rules(PID))
    known = {*processor.permitted.values(), *processor.refused.values()}
    for number in {*range(1024), 0x40000000 + processor.permitted["getpid"]} - known:
        assert result_of(program, processor.architecture, number) == refused(errno.ENOSYS)
    assert result_of(program, 0x40000003, 1) == KILL, "of another processor"


def test_a_program_fits_the_kernel(processor: Processor) -> None:
    program = filter_program(processor, worker_rules(PID))
    assert len(encoded(program)) == 8 * len(program)
    assert len(program) < 4096
    assert all(each.if_true < 256 and each.if_false < 256 for each in program)
    assert set(worker_rules(PID)) <= {*PROCESSORS["x86_64"].permitted}


def test_no_call_is_both_permitted_and_refused(processor: Processor) -> None:
    numbers = [*processor.permitted.values(), *processor.refused.values()]
    assert len(numbers) == len(set(numbers))


# Files


def test_the_folders_of_python_leave_out_those_above_the_home() -> None:
    path = ["/home/me/src", "/usr/lib/python3", "", "/home", "/", "/home/me"]
    found = python_folders(path, ("/opt/venv",), "/home/me", "/opt/cuda/lib:")
    parts = [f"/opt/venv/{part}" for part in PREFIX_PARTS]
    assert found == [*parts, "/home/me/src", "/usr/lib/python3", "/opt/cuda/lib"]


def test_a_virtual_environment_in_a_project_does_not_open_the_project(tmp_path: Path) -> None:
    """The whole prefix could be read: the project, and the folders of other jobs in it."""
    for path in ("bin/python", "lib/python3/os.py", "lib64/x.so", "pyvenv.cfg"):
        assert can_read(tmp_path, path)
    for path in ("secret.txt", "jobs/other/assignment.json", ".git/config", "share/x"):
        assert not can_read(tmp_path, path)


def can_read(prefix: Path, path: str) -> bool:
    """Return True if a worker whose Python has this prefix may read a file in it."""
    found = python_folders([], (str(prefix),), "/home/me")
    return any((prefix / path).is_relative_to(each) for each in found)


def test_the_mounts_of_bubblewrap() -> None:
    readable = ("/home/me/jobs/1", "/usr/lib", "/usr", "/proc/self/stat", "relative", "/")
    found = list(bubblewrap.mounts(FilePolicy(readable, ("/home/me/jobs/1/scratch",))))
    triples = [tuple(found[at : at + 3]) for at in range(0, len(found), 3)]
    assert [(kind, path) for kind, path, _ in triples if not path.startswith("/dev")] == [
        ("--ro-bind-try", "/usr"),
        ("--ro-bind-try", "/home/me/jobs/1"),
        ("--bind", "/home/me/jobs/1/scratch"),
    ]
    assert all(source == target for _, source, target in triples)


def test_a_worker_in_bubblewrap_sees_no_folder_above_the_home(tmp_path: Path) -> None:
    policy = FilePolicy((str(tmp_path),), ())
    found = bubblewrap.visible(policy, str(Path(sys.prefix) / "home")).readable
    assert sys.prefix not in found
    assert str(tmp_path) in found
    (tmp_path / "first").symlink_to("folder/../second")
    (tmp_path / "second").symlink_to(tmp_path / "third")
    assert bubblewrap.links(str(tmp_path / "first")) == [
        str(tmp_path / name) for name in ("first", "second", "third")
    ]


def test_no_version_of_landlock_leaves_a_right_unhandled() -> None:
    assert landlock.rights_of(1) == 0x1FFF
    assert landlock.rights_of(7) == 0xFFFF
    granted = dict(landlock.rules(FilePolicy(("/r",), ("/w",))))
    assert granted["/r"] == 0b1100, "read files and folders"
    links_devices_pipes_sockets = 0b1_1110_0100_0001
    assert not granted["/w"] & links_devices_pipes_sockets


# Network


def test_addresses_of_the_kernel_are_parsed() -> None:
    ipv4 = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 80, bytes([127, 0, 0, 1]))
    assert parse_place(ipv4) == SocketPlace(socket.AF_INET, "127.0.0.1", 80)
    mapped = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
    ipv6 = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16s", 80, 0, mapped) + bytes(4)
    place = parse_place(ipv6)
    assert place is not None
    assert place.address == Address("10.0.0.1", 80)
    assert place.arguments == (place.host, 80, 0, 0)
    for wrong in (b"", ipv4[:8], ipv6[:20], struct.pack("=H", socket.AF_UNIX) + b"/run/socket\0\0\0"):
        assert parse_place(wrong) is None


def test_only_peers_are_dialled_and_only_the_own_port_listens() -> None:
    peers = dialled([Address("10.0.0.1", 80), Address("0.0.0.0", 90), Address("name", 70)])
    policy = NetworkPolicy(peers, port=9000)

    def place(host: str, port: int) -> SocketPlace:
        return SocketPlace(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)

    assert policy.connect_error(place("10.0.0.1", 80)) == 0
    assert policy.connect_error(place("::ffff:10.0.0.1", 80)) == 0
    assert policy.connect_error(place("127.0.0.1", 90)) == 0, "what 0.0.0.0 means here"
    assert policy.connect_error(place("10.0.0.1", 81)) == errno.EACCES
    assert policy.connect_error(place("10.0.0.2", 80)) == errno.EACCES
    assert policy.connect_error(None) == errno.EAFNOSUPPORT
    assert policy.bind_error(place("::", 9000)) == policy.bind_error(place("::1", 0)) == 0
    assert policy.bind_error(place("::", 9001)) == errno.EACCES
    assert policy.bind_error(None) == errno.EAFNOSUPPORT
    assert policy.listen_error(9000) == 0
    assert policy.listen_error(0) == errno.EACCES


def test_the_network_of_a_node_has_its_neighbours_relays_and_its_own_listener() -> None:
    spec = node_file(
        0,
        address="10.0.0.5:9000",
        next=NeighbourSpec(1, "10.0.0.6:9001", ("[fd00::6]:9001",)),
        relay=RelaySpec("job", "ticket", (("10.0.0.7:443",),)),
    )
    policy = network_policy(spec, "0.0.0.0:9000")
    expected = ("10.0.0.6:9001", "[fd00::6]:9001", "10.0.0.7:443", "127.0.0.1:9000", "10.0.0.5:9000")
    assert {*map(Address.parse, expected)} <= policy.peers
    assert policy.port == 9000
    assert with_ip_addresses(spec) == spec


def test_names_of_peers_become_addresses() -> None:
    named = node_file(0, next=NeighbourSpec(1, "localhost:9001", ("nowhere.invalid:1",)))
    found = list(peer_addresses(with_ip_addresses(named)))
    assert "127.0.0.1:9001" in found
    assert "localhost:9001" not in found
    assert "nowhere.invalid:1" in found


@pytest.mark.parametrize("fails", [False, True])
def test_the_server_is_asked_for_peers_that_have_moved(fails: bool) -> None:
    ours, theirs = socket.socketpair()
    asked = threading.Semaphore(0)
    calls: list[None] = []

    def find_peers() -> list[str]:
        calls.append(None)
        asked.release()
        if fails:
            raise ServerUnreachableError("away")
        return ["10.0.0.9:90"]

    with ours, theirs:
        broker = SocketBroker(PID, ours, PROCESSORS["x86_64"], NetworkPolicy())
        updates = PeerUpdates(broker, find_peers)
        new = SocketPlace(socket.AF_INET, "10.0.0.9", 90)
        updates.on_refusal(None)
        updates.on_refusal(new)
        updates.on_refusal(new)
        assert asked.acquire(timeout=SECONDS)
        with updates._asking:
            assert broker.policy.connect_error(new) == (errno.EACCES if fails else 0)
        assert len(calls) == 1, "not more than once in a while"


# Which one


def test_the_choice_of_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "usable_sandbox", lambda _choice: Sandbox(PROCESSORS["x86_64"], 4))
    assert choose_sandbox("off") is None
    found = choose_sandbox("auto")
    assert found == choose_sandbox("landlock")
    assert describe_sandbox(found) == "jobs run in a sandbox (Landlock 4 and seccomp)"
    assert "all permissions" in describe_sandbox(None)
    with pytest.raises(SettingsError, match="auto, bwrap, landlock, off"):
        choose_sandbox("docker")


def test_bubblewrap_is_used_where_it_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usable = usable_sandbox.__wrapped__  # without its cache
    plain = Sandbox(PROCESSORS["x86_64"], 4)
    wrapped = Sandbox(PROCESSORS["x86_64"], 4, "/usr/bin/bwrap")
    monkeypatch.setattr(choice, "find_sandbox", lambda: plain)
    monkeypatch.setattr(choice, "tried", lambda _sandbox: "")
    monkeypatch.setattr(choice.shutil, "which", lambda _program: None)
    assert usable("bwrap") == "it is not installed"
    assert str(usable("auto")) == "Landlock 4 and seccomp; without bubblewrap: it is not installed"
    monkeypatch.setattr(choice.shutil, "which", lambda _program: "/usr/bin/bwrap")
    assert usable("auto") == usable("bwrap") == wrapped
    assert str(wrapped) == "bubblewrap, Landlock 4 and seccomp"
    assert usable("landlock") == plain
    assert [each.kind for each in (plain, wrapped)] == ["landlock", "bwrap"]
    monkeypatch.setattr(choice, "tried", lambda sandbox: "forbidden" * (sandbox.kind == "bwrap"))
    assert usable("bwrap") == "its trial failed: forbidden"
    assert usable("auto").kind == "landlock"
    monkeypatch.setattr(choice, "usable_sandbox", usable)
    with pytest.raises(SettingsError, match=r"forbidden.*--sandbox auto"):
        choose_sandbox("bwrap")


def test_a_provider_does_not_start_without_a_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(choice, "usable_sandbox", lambda _choice: "it has no Landlock")
    with pytest.raises(SettingsError, match=r"it has no Landlock.*--sandbox off"):
        provide("http://127.0.0.1:1", "token", folder=tmp_path / "provider")
    assert not (tmp_path / "provider").exists()


def test_the_reason_why_a_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.sys, "platform", "darwin")
    assert "there is none for" in str(find_sandbox())
    monkeypatch.setattr(choice.sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in str(find_sandbox())
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    assert "this kernel has none" in str(find_sandbox())
    monkeypatch.setattr(kernel, "landlock_version", lambda: 3)
    monkeypatch.setattr(kernel, "can_ask", lambda: False)
    assert "seccomp" in str(find_sandbox())
    monkeypatch.setattr(kernel, "can_ask", lambda: True)
    assert find_sandbox() == Sandbox(PROCESSORS["x86_64"], 3)
