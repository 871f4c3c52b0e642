"""A cluster under virtual time that loses nodes, and recovers with the real decisions."""

from __future__ import annotations

from fault_plan import FaultKind
from virtual_case import OUTAGE, VirtualCase, VirtualFault
from virtual_disk import StageContent, Stored, VirtualDisk
from virtual_nodes import VirtualClock, VirtualNode
from virtual_training import VirtualTraining

from ravnest.runtime.control.resume_choice import choose_resume, merge_offers
from ravnest.types import CheckpointId
from ravnest.wire.messages import ResumeFrom, ResumeOffer

MOST_EVENTS = 200_000
DETECTION, CLOSING, EXCHANGE, TRANSFER = 2.0, 2.0, 2.0, 3.0
"""Seconds at most until a loss is noticed, a node has closed its runtime, the nodes have exchanged what
they have, and a state has travelled."""


class VirtualCluster:
    """Nodes, what happens to them, and their recoveries."""

    def __init__(self, case: VirtualCase) -> None:
        self.case = case
        self.clock = VirtualClock(-1 - case.seed)
        self.nodes = [VirtualNode(stage) for stage in range(case.stages)]
        self.attempts = 0
        self.resumed: list[CheckpointId] = []
        """Checkpoints that attempts began with."""
        self.attempt = self._attempt()
        self.attempt.alive = False
        self._waiting: set[int] = set()
        """Stages whose state is on its way."""
        self._loading: set[int] = set()
        """Stages that know the decision."""
        self._complete: CheckpointId | None = None
        """Newest checkpoint that all nodes have stored."""
        self._lost: set[int] = set()
        """Nodes whose disk was lost since then."""
        self._refused: set[tuple[int, CheckpointId]] = set()
        """Stages and checkpoints whose replica had no place at the neighbour."""
        for fault in case.faults:
            self.clock.at(fault.at, self._strike, fault)
        self._gather()

    def run(self) -> list[StageContent]:
        """Run until training has ended; return what the stages have learned."""
        for _ in range(MOST_EVENTS):
            assert self.clock.step(), "nothing happens any more, but training has not ended"
            stages = self.attempt.stages
            if len(stages) == self.case.stages and all(each.finished for each in stages.values()):
                return [stages[number].content for number in range(self.case.stages)]
        raise AssertionError("training does not end")

    def _attempt(self) -> VirtualTraining:
        name = f"attempt{self.attempts}"
        return VirtualTraining(name, self.case, self.clock, self._completed, self._refuse)

    def _completed(self, attempt: VirtualTraining, checkpoint: CheckpointId) -> None:
        self._complete = checkpoint
        self._lost = {stage for stage in self._lost if not attempt.stages[stage].alive}

    def _refuse(self, stage: int, checkpoint: CheckpointId) -> None:
        self._refused.add((stage, checkpoint))

    # Faults

    def _strike(self, fault: VirtualFault) -> None:
        node, now = self.nodes[fault.node], self.clock.now
        match fault.kind:
            case FaultKind.KILL:
                self._kill(node, fault)
            case FaultKind.STOP:
                node.stopped_until = max(node.stopped_until, now + fault.seconds)
                if fault.seconds > OUTAGE:
                    self.clock.at(now + OUTAGE, self._interrupt, self.attempt)
            case FaultKind.DELAY:
                node.slow_until = now + fault.seconds
            case FaultKind.FULL_DISK:
                node.full_until = now + fault.seconds

    def _kill(self, node: VirtualNode, fault: VirtualFault) -> None:
        node.up, node.wanted, node.stopped_until, node.busy_until = False, "", 0.0, 0.0
        node.process += 1
        if fault.disk != "kept":
            self._lost.add(node.stage)
            node.earlier.append(node.disk)
            node.disk = VirtualDisk() if fault.disk == "lost" else node.earlier.pop(0)
        self.clock.at(self.clock.now + fault.seconds, self._start, node, node.process)
        self.clock.at(self.clock.soon(DETECTION), self._interrupt, self.attempt)

    def _start(self, node: VirtualNode, process: int) -> None:
        if node.process == process:  # otherwise it was killed again before it started
            node.up = True
            self._gather()

    def _interrupt(self, attempt: VirtualTraining) -> None:
        """Make all nodes leave an attempt in which a node was lost."""
        if not attempt.alive:
            return
        attempt.alive = False
        for stage in attempt.stages.values():
            if stage.alive and attempt.trains:
                stage.node.wanted = attempt.decision.run
        self._gather()

    # Recovery

    def _gather(self) -> None:
        """Begin an attempt when all nodes are there."""
        if self.attempt.alive or not all(node.up for node in self.nodes):
            return
        last = self.attempt
        self.attempts += 1
        self.attempt = self._attempt()
        ready = max(max(node.stopped_until, self.clock.now) for node in self.nodes)
        closing = CLOSING if self.attempts > 1 else 0.0
        later = self.clock.random.random() * EXCHANGE
        self.clock.at(ready + closing + later, self._decide, self.attempt, last)

    def _decide(self, attempt: VirtualTraining, last: VirtualTraining) -> None:
        last.closed = True
        if not attempt.alive or not all(node.up for node in self.nodes):
            return
        offer: ResumeOffer | None = None
        for node in reversed(self.nodes):
            own = ResumeOffer(node.disk.held(node.stage), node.wanted, self.case.resumes)
            offer = merge_offers(own, offer)
        assert offer is not None
        attempt.decision = decision = choose_resume(offer, len(self.nodes), attempt.name)
        self._check(decision)
        self._waiting, self._loading = set(decision.sources), set()
        for node in self.nodes:
            self.clock.at(self.clock.soon(EXCHANGE), self._load, attempt, node, node.process)

    def _check(self, decision: ResumeFrom) -> None:
        """Check that a checkpoint that all had is not lost; one of their disks may be."""
        complete, lost = self._complete, self._lost
        continues = self.case.resumes or any(node.wanted for node in self.nodes)
        if complete is not None and continues and decision.checkpoint >= complete:
            return
        self._complete = None
        if complete is None or not continues:
            return
        alone = self.case.stages == 1
        unsafe = any(alone or (stage, complete) in self._refused for stage in lost)
        assert unsafe or len(lost) > 1, (
            f"training continues from {decision.checkpoint}, though all had {complete}"
        )

    def _load(self, attempt: VirtualTraining, node: VirtualNode, process: int) -> None:
        if not attempt.alive or node.process != process:
            return
        if node.stopped_until > self.clock.now:
            self.clock.at(node.stopped_until, self._load, attempt, node, process)
            return
        decision = attempt.decision
        node.disk.begin_attempt(decision)
        for stage, holder in decision.sources.items():
            if holder == node.stage:
                stored = node.disk.replicas[stage][decision.checkpoint]
                arrival = self.clock.soon(TRANSFER)
                self.clock.at(arrival, self._restore, attempt, self.nodes[stage], stored)
        self._loading.add(node.stage)
        self._load_if_there(attempt, node)

    def _restore(self, attempt: VirtualTraining, node: VirtualNode, stored: Stored) -> None:
        if attempt.alive and node.up:
            node.disk.add(None, stored, stored.id)
            self._waiting.discard(node.stage)
            self._load_if_there(attempt, node)

    def _load_if_there(self, attempt: VirtualTraining, node: VirtualNode) -> None:
        if node.stage in self._loading - self._waiting:
            attempt.load(node)
            if len(attempt.stages) == self.case.stages:
                self.clock.at(self.clock.soon(EXCHANGE), self._begin, attempt)

    def _begin(self, attempt: VirtualTraining) -> None:
        if attempt.alive and all(stage.alive for stage in attempt.stages.values()):
            self.resumed.append(attempt.decision.checkpoint)
            attempt.begin()
