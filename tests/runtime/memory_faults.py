"""Faults of links in the in-memory network, applied when the Root has made a number of updates."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable

from fault_plan import Fault, FaultKind, FaultPlan

from ravnest.telemetry import LossRecord, WorkerRecord
from ravnest.transport.memory import MemoryNetwork


class MemoryFaults:
    """Plan of link faults, and the network that it disturbs; the Root's ``record_sink``."""

    def __init__(self, plan: FaultPlan) -> None:
        self.network = MemoryNetwork(passage=self._pass)
        self.happened: list[Fault] = []
        self._drawn = random.Random(plan.seed)
        self._lock = threading.Lock()
        self._waiting = list(plan.faults)
        self._tampering: dict[tuple[int, int], list[FaultKind]] = defaultdict(list)
        self._held: dict[tuple[int, int], bytes] = {}
        self._late: dict[tuple[int, int], float] = {}
        self._timers: list[threading.Timer] = []

    def emit(self, record: WorkerRecord) -> None:
        """Let faults happen that are due."""
        if not isinstance(record, LossRecord):
            return
        with self._lock:
            due = [fault for fault in self._waiting if fault.moment.at <= record.update]
            self._waiting = [fault for fault in self._waiting if fault not in due]
        for fault in due:
            self._happen(fault)

    def close(self) -> None:
        """Cancel what is still to end."""
        for timer in self._timers:
            timer.cancel()

    def _happen(self, fault: Fault) -> None:
        self.happened.append(fault)
        node, peer = fault.node, fault.peer
        assert peer is not None, f"{fault.kind} is not a fault of links"
        match fault.kind:
            case FaultKind.PARTITION:
                self.network.part(node, peer)
                self._after(fault, lambda: self.network.heal(node, peer))
            case FaultKind.ONE_WAY:
                self.network.block(node, peer)
                self._after(fault, lambda: self.network.unblock(node, peer))
            case FaultKind.DELAY:
                assert fault.size is not None
                self._late[node, peer] = fault.size
                self._after(fault, lambda: self._late.pop((node, peer), None))
            case _:
                with self._lock:
                    self._tampering[node, peer].append(fault.kind)

    def _after(self, fault: Fault, call: Callable[[], object]) -> None:
        assert fault.seconds is not None
        timer = threading.Timer(fault.seconds, call)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _pass(self, sender: int, receiver: int, batch: bytes) -> list[tuple[float, bytes]]:
        """Return what arrives instead of a batch, and how much later."""
        way, late = (sender, receiver), self._late.get((sender, receiver), 0.0)
        with self._lock:
            if (held := self._held.pop(way, None)) is not None:
                return [(late, batch), (late, held)]
            waiting = self._tampering[way]
            match waiting.pop(0) if waiting else None:
                case FaultKind.CORRUPT:
                    changed = bytearray(batch)
                    changed[self._drawn.randrange(len(changed))] ^= 1 << self._drawn.randrange(8)
                    return [(late, bytes(changed))]
                case FaultKind.DUPLICATE:
                    return [(late, batch), (late, batch)]
                case FaultKind.REORDER:
                    self._held[way] = batch
                    return []
        return [(late, batch)]
