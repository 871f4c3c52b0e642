"""Training of a virtual cluster between two losses: real schedule machines, real checkpoint policy.

Modelled are time, links, disks, the user's script at the Root, and a stage: its state is the list of
what it has applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from virtual_case import VirtualCase
from virtual_disk import Applied, Position, StageContent, Stored
from virtual_nodes import VirtualClock, VirtualNode

from ravnest.runtime.control.checkpoint_policy import CheckpointPolicy
from ravnest.runtime.control.stored_checkpoints import StoredCheckpoints
from ravnest.runtime.schedule import events
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.schedule.progress import StageTraits
from ravnest.types import BEGINNING, CheckpointId, MicrobatchId
from ravnest.wire.messages import CheckpointComplete, CheckpointStored, ResumeFrom

DONE = events.Done()


class Work(NamedTuple):
    """A micro-batch on its way."""

    id: MicrobatchId
    data: Applied
    ends_update: bool
    checkpoint: Position | None

    @property
    def arrival(self) -> events.ForwardArrived:
        last = self.data.part == self.data.parts - 1
        return events.ForwardArrived(self.id, last, self.ends_update)


@dataclass
class VirtualStage:
    """A stage in an attempt."""

    node: VirtualNode
    process: int
    machine: ScheduleMachine
    content: StageContent
    position: Position
    known: StoredCheckpoints
    phases_over: int
    complete: CheckpointId | None
    works: dict[MicrobatchId, Work] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)
    """First micro-batch of each phase."""
    ends: dict[int, Position | None] = field(default_factory=dict)
    """Phases that have ended; the position if a checkpoint follows."""
    held: list[tuple[Any, Any]] = field(default_factory=list)
    """Events that have arrived while the process was stopped."""
    running: events.Run | None = None
    gradients: list[Applied] = field(default_factory=list)
    last: Work | None = None
    taking: bool = False
    """The last checkpoint was requested."""
    finished: bool = False
    forward_free: float = 0.0
    backward_free: float = 0.0

    @property
    def alive(self) -> bool:
        return self.process == self.node.process


class VirtualTraining:
    """An attempt: time from one recovery to the next loss."""

    def __init__(
        self,
        name: str,
        case: VirtualCase,
        clock: VirtualClock,
        completed: Callable[[VirtualTraining, CheckpointId], None],
        refused: Callable[[int, CheckpointId], None],
    ) -> None:
        """``completed``: called when all have a checkpoint. ``refused``: a replica found no place."""
        self.name = name
        self.case = case
        self.clock = clock
        self._completed = completed
        self._refused = refused
        self.decision = ResumeFrom("", BEGINNING, {})
        self.stages: dict[int, VirtualStage] = {}
        """Stages that have loaded their state."""
        self.alive = True
        self.closed = False
        """All nodes have left it, and wait for its checkpoints no longer."""
        self.trains = False
        # The user's script at the Root
        self.policy = CheckpointPolicy(None, 0.0, 0, 0.0)
        self.phase = self.batches = self.updates = self.submitted = self.admitted = 0
        self.count = 0
        """Micro-batches of the open phase."""
        self.begun = self.ended = False
        """The phase has begun, and all its batches are submitted."""

    def load(self, node: VirtualNode) -> None:
        """Load the state of a stage as it was decided."""
        case, checkpoint = self.case, self.decision.checkpoint
        content, position = StageContent(), Position(0, 0)
        if checkpoint != BEGINNING:
            node.disk.drop_later(self.decision)
            stored = node.disk.own[checkpoint]
            assert (stored.run, stored.attempt) == (self.decision.run, self.decision.taken)
            content, position = stored.content, stored.position
        machine = ScheduleMachine(
            node.stage,
            case.stages,
            schedule=case.schedule,
            window=case.window,
            traits=StageTraits(defers=case.defers and node.stage > 0, clip=case.clip),
        )
        machine.continue_from(checkpoint.update)
        self.stages[node.stage] = VirtualStage(
            node,
            node.process,
            machine,
            content,
            position,
            StoredCheckpoints(is_leaf=node.stage == case.stages - 1),
            checkpoint.phase,
            None if checkpoint == BEGINNING else checkpoint,
        )

    def begin(self) -> None:
        """Begin to train; all stages have loaded their state."""
        case, checkpoint, root = self.case, self.decision.checkpoint, self.stages[0]
        for stage in self.stages.values():
            assert stage.content == root.content, "states do not fit together"
        assert len(root.content.updates) == checkpoint.update
        self.trains = True
        self.phase, self.updates = checkpoint.phase, checkpoint.update
        self.policy = CheckpointPolicy(
            case.checkpoint_updates,
            case.checkpoint_seconds,
            0,
            self.clock.now,
            case.pause,
        )
        self.policy.resume(checkpoint.update, checkpoint.phase)
        self.batches, self.count = root.position
        self._secure()
        self._script()

    def _secure(self) -> None:
        """Send replicas of the checkpoint that training continues from, where there are none."""
        checkpoint = self.decision.checkpoint
        if checkpoint == BEGINNING:
            return
        for stage in self.stages.values():
            settled = CheckpointStored(checkpoint, True)
            if stage.node.stage not in self.decision.alone or self.case.stages == 1:
                self._settle(stage, settled)
            else:
                self._replicate(stage, stage.node.disk.own[checkpoint])

    # The user's script at the Root

    def _script(self) -> None:
        """Go on with the script until it has to wait."""
        root, phases = self.stages[0], self.case.phases
        if not (self.alive and root.alive):
            return
        while self.phase < len(phases):
            trains, batches = phases[self.phase]
            if not self.begun:
                if not trains and root.phases_over < self.phase:
                    return  # a validation begins when the epoch before it is over
                self.begun = True
                self._handle(root, events.PhaseBegun(self.phase, trains, self.count))
            while self.batches < batches:
                if self.submitted >= self.admitted:
                    return
                self._submit(root, trains)
            if not self.ended:
                self.ended = True
                self._end_phase(root, trains)
            if not trains and self.phase not in root.content.validations:
                return
            self.phase, self.begun, self.ended = self.phase + 1, False, False
            self.batches = self.count = 0
        if root.phases_over == len(phases) and not root.taking:
            self.policy.take(self.updates, self.clock.now)
            self._take(root)

    def _submit(self, root: VirtualStage, trains: bool) -> None:
        case, batch = self.case, self.batches
        # As with the tuner, the number of micro-batches of a batch differs from attempt to attempt.
        parts = case.parts[(batch + len(self.name)) % len(case.parts)] if trains else 1
        self.batches += 1
        ends_update = trains and self.batches % case.update_frequency == 0
        saves = ends_update and self.policy.due_after_update(self.updates + 1, self.clock.now)
        for part in range(parts):
            last = part == parts - 1
            work = Work(
                MicrobatchId(self.phase, self.count),
                Applied(self.phase, batch, part, parts),
                ends_update and last,
                Position(self.batches, self.count + 1) if saves and last else None,
            )
            self.count += 1
            self.submitted += 1
            self._handle(root, work.arrival, work)
        self.updates += ends_update

    def _end_phase(self, root: VirtualStage, trains: bool) -> None:
        position = None
        if trains:
            self.updates += self.batches % self.case.update_frequency > 0
            new = self.count > root.firsts[self.phase]
            if new and self.policy.due_after_epoch(self.updates, self.clock.now):
                position = Position(0, 0)
        self._handle(root, events.PhaseEnded(self.phase, self.count), position)

    # Stages

    def _arrive(self, stage: VirtualStage, event: Any, extra: Any) -> None:
        """Deliver an event to a stage, once its process runs; in order, as a link does."""
        if not self.alive or not stage.alive:
            return
        if stage.held or stage.node.stopped_until > self.clock.now:
            stage.held.append((event, extra))
            if len(stage.held) == 1:
                self.clock.at(stage.node.stopped_until, self._continue, stage)
            return
        self._deliver(stage, event, extra)

    def _continue(self, stage: VirtualStage) -> None:
        """Deliver what has arrived while the process was stopped; it may be stopped for longer."""
        if stage.node.stopped_until > self.clock.now:
            self.clock.at(stage.node.stopped_until, self._continue, stage)
            return
        held, stage.held = stage.held, []
        for event, extra in held:
            if self.alive and stage.alive:
                self._deliver(stage, event, extra)

    def _deliver(self, stage: VirtualStage, event: Any, extra: Any) -> None:
        if isinstance(event, str):
            getattr(self, event)(stage, extra)
        else:
            self._handle(stage, event, extra)

    def _handle(self, stage: VirtualStage, event: events.Event, extra: Any = None) -> None:
        if event is DONE:
            self._compute(stage)
        elif isinstance(event, events.ForwardArrived):
            stage.works[event.microbatch] = extra
        elif isinstance(event, events.PhaseBegun):
            stage.firsts[event.phase] = event.first
        elif isinstance(event, events.PhaseEnded):
            stage.ends[event.phase] = extra
        for action in stage.machine.handle(event, self.clock.now):
            _PERFORM[type(action)](self, stage, action)
        if stage.taking and not stage.finished:
            self._finish_if_idle(stage)

    def _compute(self, stage: VirtualStage) -> None:
        """Carry out the computation that has just ended."""
        run, stage.running = stage.running, None
        match run:
            case events.RunForward(microbatch, version, trains, update):
                assert microbatch in stage.works
                late = self.case.schedule == "async" and not stage.machine.is_leaf
                assert not trains or version == update or (late and version + 1 == update)
            case events.RunBackward(microbatch):
                stage.last = stage.works[microbatch]
                if not stage.machine.traits.defers:
                    stage.gradients.append(stage.works.pop(microbatch).data)
            case events.RunWeights(microbatch):
                stage.gradients.append(stage.works.pop(microbatch).data)
            case events.RunStep(update):
                self._step(stage, update)
            case events.RunPhaseEnd(phase, trains):
                self._finish_phase(stage, phase, trains)

    def _step(self, stage: VirtualStage, update: int) -> None:
        content, last = stage.content, stage.last
        assert last is not None
        assert update == len(content.updates)
        stage.content = content._replace(
            updates=(*content.updates, tuple(stage.gradients)), lineage=(*content.lineage, self.name)
        )
        stage.gradients.clear()
        if last.checkpoint is not None:
            self._save(stage, CheckpointId(update + 1, last.id.phase), last.checkpoint)

    def _finish_phase(self, stage: VirtualStage, phase: int, trains: bool) -> None:
        if trains:
            stage.content = stage.content._replace(epochs=(*stage.content.epochs, phase))
        stage.phases_over = phase + 1
        position = stage.ends[phase]
        if position is not None:
            self._save(stage, CheckpointId(len(stage.content.updates), phase + 1), position)
        if stage.machine.is_leaf and not trains:
            self._score(stage, phase)
        if stage.machine.is_root:
            self.clock.at(self.clock.now, self._script)

    def _score(self, stage: VirtualStage, phase: int) -> None:
        """Send the result of a validation to the Root, which tells all nodes."""
        if stage.machine.is_root:
            self._validated(stage, phase)
        else:
            self._to_previous(stage, "_score", phase)

    def _validated(self, stage: VirtualStage, phase: int) -> None:
        content = stage.content
        stage.content = content._replace(validations=(*content.validations, phase))
        self._to_next(stage, "_validated", phase)
        if stage.machine.is_root:
            self.clock.at(self.clock.now, self._script)

    def _take(self, stage: VirtualStage, _: None = None) -> None:
        """Take the last checkpoint when everything is over here."""
        stage.taking = True
        self._to_next(stage, "_take", None)
        self._finish_if_idle(stage)

    def _finish_if_idle(self, stage: VirtualStage) -> None:
        if stage.machine.idle:
            stage.finished = True
            checkpoint = CheckpointId(len(stage.content.updates), stage.phases_over)
            self._save(stage, checkpoint, Position(0, 0))

    # Checkpoints

    def _save(self, stage: VirtualStage, checkpoint: CheckpointId, position: Position) -> None:
        node, now = stage.node, self.clock.now
        if node.full_until > now:
            self._settle(stage, CheckpointStored(checkpoint, False))
            return
        stored = Stored(self.decision.run, self.name, checkpoint, stage.content, position)
        seconds = self.case.writing[node.stage]
        written = max(now, node.busy_until) + seconds
        node.busy_until = written + seconds / 2
        self.clock.at(written, self._write, stage, stored)

    def _write(self, stage: VirtualStage, stored: Stored) -> None:
        """Finish a checkpoint on the node's own disk, and send its replica."""
        node, now = stage.node, self.clock.now
        if not stage.alive or self.closed:
            return
        if node.stopped_until > now:
            self.clock.at(node.stopped_until, self._write, stage, stored)
            return
        if node.full_until > now:
            self._settle(stage, CheckpointStored(stored.id, False))
            return
        node.disk.add(None, stored, stage.complete)
        if not self.alive:
            return
        if self.case.stages == 1:
            self._settle(stage, CheckpointStored(stored.id, True))
            return
        self._replicate(stage, stored)

    def _replicate(self, stage: VirtualStage, stored: Stored) -> None:
        number = stage.node.stage
        neighbour = self.stages[1 if number == 0 else number - 1]
        seconds = self.case.writing[number] / 2
        self.clock.at(self.clock.now + seconds, self._copy, stage, neighbour, stored)

    def _copy(self, stage: VirtualStage, neighbour: VirtualStage, stored: Stored) -> None:
        """Finish a replica, and tell its owner."""
        if not (self.alive and stage.alive and neighbour.alive):
            return
        if neighbour.node.full_until > self.clock.now:
            self._refused(stage.node.stage, stored.id)
        else:
            neighbour.node.disk.add(stage.node.stage, stored, neighbour.complete)
        settled = CheckpointStored(stored.id, True)
        self.clock.at(self.clock.soon(self.case.delay), self._arrive, stage, "_settle", settled)

    def _settle(self, stage: VirtualStage, here: CheckpointStored) -> None:
        self._report(stage, stage.known.settled_here(here))

    def _settle_behind(self, stage: VirtualStage, behind: CheckpointStored) -> None:
        self._report(stage, stage.known.settled_behind(behind))

    def _report(self, stage: VirtualStage, report: CheckpointStored | None) -> None:
        if report is None or not self.alive:
            return
        if not stage.machine.is_root:
            self._to_previous(stage, "_settle_behind", report)
            return
        if report.stored:
            self._completed(self, report.checkpoint)
            self._keep(stage, CheckpointComplete(report.checkpoint))
        self.policy.settled += 1

    def _keep(self, stage: VirtualStage, complete: CheckpointComplete) -> None:
        stage.complete = complete.checkpoint
        self._to_next(stage, "_keep", complete)

    # Actions

    def _start_run(self, stage: VirtualStage, run: events.Run) -> None:
        stage.running = run
        short = isinstance(run, events.RunStep | events.RunPhaseEnd)
        seconds = self.case.pause if short else self.case.speeds[stage.node.stage]
        self.clock.at(self.clock.now + seconds, self._arrive, stage, DONE, None)

    def _to_next(self, stage: VirtualStage, event: Any, extra: Any = None) -> None:
        if not stage.machine.is_leaf:
            stage.forward_free = self._arrival(stage.node, stage.forward_free)
            following = self.stages[stage.node.stage + 1]
            self.clock.at(stage.forward_free, self._arrive, following, event, extra)

    def _to_previous(self, stage: VirtualStage, event: Any, extra: Any = None) -> None:
        stage.backward_free = self._arrival(stage.node, stage.backward_free)
        previous = self.stages[stage.node.stage - 1]
        self.clock.at(stage.backward_free, self._arrive, previous, event, extra)

    def _arrival(self, node: VirtualNode, free: float) -> float:
        """Return the arrival of a message; messages stay in order."""
        slow = 3.0 if node.slow_until > self.clock.now else 0.0
        return max(free, self.clock.soon(2 * self.case.delay) + slow)

    def _send_forward(self, stage: VirtualStage, action: events.SendForward) -> None:
        work = stage.works[action.microbatch]
        self._to_next(stage, work.arrival, work)

    def _send_begin(self, stage: VirtualStage, action: events.SendPhaseBegin) -> None:
        first = stage.firsts[action.phase]
        self._to_next(stage, events.PhaseBegun(action.phase, action.trains, first))

    def _send_end(self, stage: VirtualStage, action: events.SendPhaseEnd) -> None:
        ended = events.PhaseEnded(action.phase, action.count)
        self._to_next(stage, ended, stage.ends[action.phase])

    def _send_backward(self, stage: VirtualStage, action: events.SendBackward) -> None:
        self._to_previous(stage, events.BackwardArrived(action.microbatch))

    def _send_result(self, stage: VirtualStage, action: events.SendResult) -> None:
        self._to_previous(stage, events.ResultArrived(action.microbatch))

    def _send_norms(self, stage: VirtualStage, action: events.SendNorms) -> None:
        self._to_previous(stage, events.NormsArrived(action.update))

    def _combine(self, stage: VirtualStage, action: events.CombineNorms) -> None:
        clip = events.ClipNormArrived(action.update)
        self.clock.at(self.clock.now, self._arrive, stage, clip, None)

    def _send_clip(self, stage: VirtualStage, action: events.SendClipNorm) -> None:
        self._to_next(stage, events.ClipNormArrived(action.update))

    def _admit(self, _: VirtualStage, action: events.Admit) -> None:
        self.admitted = action.total
        self.clock.at(self.clock.now, self._script)

    def _ignore(self, stage: VirtualStage, action: events.Action) -> None:
        pass

    def _fail(self, _: VirtualStage, action: events.Fail) -> None:
        raise AssertionError(action.reason)


_PERFORM: dict[type, Callable[[VirtualTraining, VirtualStage, Any], None]] = {
    events.RunForward: VirtualTraining._start_run,
    events.RunBackward: VirtualTraining._start_run,
    events.RunWeights: VirtualTraining._start_run,
    events.RunStep: VirtualTraining._start_run,
    events.RunPhaseEnd: VirtualTraining._start_run,
    events.SendForward: VirtualTraining._send_forward,
    events.SendBackward: VirtualTraining._send_backward,
    events.SendResult: VirtualTraining._send_result,
    events.SendPhaseBegin: VirtualTraining._send_begin,
    events.SendPhaseEnd: VirtualTraining._send_end,
    events.SendNorms: VirtualTraining._send_norms,
    events.CombineNorms: VirtualTraining._combine,
    events.SendClipNorm: VirtualTraining._send_clip,
    events.Admit: VirtualTraining._admit,
    events.Finished: VirtualTraining._ignore,
    events.FreeVersion: VirtualTraining._ignore,
    events.Fail: VirtualTraining._fail,
}
