"""Broker of a sandboxed process's sockets, in its agent.

The process can neither connect, bind nor listen. Its calls stop in the kernel and come here; for one
that the policy permits, the broker makes the call on a copy of the socket. Nothing that the process
changes meanwhile matters: the broker uses the address that it has read and checked.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ravnest.provider.sandbox import kernel
from ravnest.provider.sandbox.network_policy import NetworkPolicy, SocketPlace, parse_place
from ravnest.provider.sandbox.system_calls import Processor

logger = logging.getLogger(__name__)

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
"""``SECCOMP_IOCTL_NOTIF_RECV`` and ``SECCOMP_IOCTL_NOTIF_SEND``."""
_QUESTION = struct.Struct("=QIIiIQ6Q")
"""``struct seccomp_notif``: id, thread, flags, call, architecture, instruction, arguments."""
_ANSWER = struct.Struct("=Qqii")
"""``struct seccomp_notif_resp``: id, result, error, flags."""
_LONGEST_PLACE = 128
_MOST_WAITING = 512
"""Connections that may wait at a listener."""

OnRefusal = Callable[[SocketPlace | None], None]
"""Called with an address that the process wanted to dial and may not, from the broker's thread."""


@dataclass
class SocketBroker:
    """Thread that answers one process until it ends."""

    pid: int
    """A process that this one started, or the child of such a one."""
    channel: socket.socket
    """Socket over which the process sends the listener of its filter."""
    processor: Processor
    policy: NetworkPolicy
    """May be replaced at any time."""
    on_refusal: OnRefusal = lambda _place: None
    _process: int = field(init=False, default=-1)

    def start(self) -> None:
        """Start the thread; ``OSError`` if the process has ended and was waited for."""
        self._process = os.pidfd_open(self.pid)
        threading.Thread(target=self._run, name=f"sockets of {self.pid}", daemon=True).start()

    def _run(self) -> None:
        try:
            with self.channel:
                _, descriptors, _, _ = socket.recv_fds(self.channel, 64, 1)
            if not descriptors:  # it ended before, which closed its end of the channel
                return
            listener = descriptors[0]
            try:
                memory = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._answer_all(listener, memory)
                finally:
                    os.close(memory)
            finally:
                os.close(listener)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return
        except Exception:  # top of the thread: without it, the worker has no network
            logger.exception("the sockets of the worker %d cannot be brokered", self.pid)
        finally:
            os.close(self._process)

    def _answer_all(self, listener: int, memory: int) -> None:
        waiting = select.poll()
        waiting.register(listener, select.POLLIN)
        waiting.register(self._process, select.POLLIN)
        while True:
            ready = dict(waiting.poll())
            if self._process in ready or ready.get(listener, 0) & (select.POLLHUP | select.POLLERR):
                return
            question = bytearray(_QUESTION.size)
            try:
                kernel.control(listener, _RECEIVE, question)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):  # the thread that asked has ended
                    continue
                raise
            number, _, _, call, _, _, *arguments = _QUESTION.unpack(question)
            try:
                failure = self._answer(call, arguments, memory)
            except OSError as error:
                failure = error.errno or errno.EACCES
            except (OverflowError, ValueError):  # numbers that no call can have
                failure = errno.EINVAL
            answer = bytearray(_ANSWER.pack(number, 0, -failure, 0))
            try:
                kernel.control(listener, _SEND, answer)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise

    def _answer(self, call: int, arguments: list[int], memory: int) -> int:
        """Make the call if it is permitted; return 0 or the error number."""
        copied = kernel.copy_descriptor(self._process, arguments[0] & 0x7FFFFFFF)
        try:
            own = socket.socket(fileno=copied)
        except OSError:
            os.close(copied)
            raise
        with own:
            if own.type != socket.SOCK_STREAM or own.family not in (socket.AF_INET, socket.AF_INET6):
                return errno.EACCES
            if call == self.processor.permitted["listen"]:
                return self._listen(own, arguments[1] & 0xFFFFFFFF)
            size = min(arguments[2] & 0xFFFFFFFF, _LONGEST_PLACE)
            place = parse_place(os.pread(memory, size, arguments[1]))
            if place is not None and place.family != own.family:
                return errno.EAFNOSUPPORT
            if call == self.processor.permitted["bind"]:
                return self._bind(own, place)
            return self._connect(own, place)

    def _connect(self, own: socket.socket, place: SocketPlace | None) -> int:
        failure = self.policy.connect_error(place)
        if failure or place is None:
            self.on_refusal(place)
            return failure
        if os.get_blocking(own.fileno()):  # it would hold up the others
            return errno.EOPNOTSUPP
        return own.connect_ex(place.arguments)

    def _bind(self, own: socket.socket, place: SocketPlace | None) -> int:
        failure = self.policy.bind_error(place)
        if failure or place is None:
            return failure
        own.bind(place.arguments)
        return 0

    def _listen(self, own: socket.socket, backlog: int) -> int:
        failure = self.policy.listen_error(own.getsockname()[1])
        if not failure:
            own.listen(min(backlog, _MOST_WAITING))
        return failure
