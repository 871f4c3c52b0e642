"""Checkpoints of all stages of a cluster, taken at the same point: collected from files and checked."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ravnest.errors import StageFormatError
from ravnest.split.graph import MAX_STAGES
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.store.files import sha256_of, size_of
from ravnest.types import CheckpointId

logger = logging.getLogger(__name__)

_NODE = re.compile(r"node_\d+")
_REPLICA = re.compile(r"replica_of_stage_\d+")


@dataclass(frozen=True)
class StageCheckpoint:
    """Checkpoint of one stage: its manifest, and the path of its tensors."""

    manifest: CheckpointManifest
    tensors: Path

    def __post_init__(self) -> None:
        stage, stages = self.manifest.stage, self.manifest.stages
        if not 0 <= stage < stages <= MAX_STAGES:
            raise StageFormatError(f"{self.tensors}: stage {stage} of {stages} does not exist")

    def check(self) -> None:
        """Raise ``StageFormatError`` if the file is not the one that the manifest describes."""
        manifest = self.manifest
        if (size := size_of(self.tensors)) != manifest.size:
            raise StageFormatError(f"{self.tensors} has {size} bytes, not {manifest.size}")
        if sha256_of(self.tensors) != manifest.sha256:
            raise StageFormatError(f"{self.tensors} is damaged: its manifest has another digest")


@dataclass(frozen=True)
class CheckpointSet:
    """Undamaged checkpoints of all stages of one cluster, taken at the same point of one run.

    ``checkpoint_set`` and ``find_checkpoint_sets`` create it.
    """

    stages: tuple[StageCheckpoint, ...]
    """By stage, all of them."""

    @property
    def id(self) -> CheckpointId:
        """Identifier of each of the checkpoints."""
        return self.stages[0].manifest.id

    @property
    def run(self) -> str:
        """Run that the checkpoints belong to."""
        return self.stages[0].manifest.run


@dataclass(frozen=True)
class _Cut:
    """Point of a run at which all stages of a cluster have taken a checkpoint."""

    plan: str
    run: str
    cluster: int
    stages: int
    id: CheckpointId
    attempt: str = ""
    """Attempt of the run: after a loss, updates are made again, and may differ with late gradients."""

    @classmethod
    def of(cls, manifest: CheckpointManifest) -> _Cut:
        plan, run, cluster, stages = manifest.plan, manifest.run, manifest.cluster, manifest.stages
        return cls(plan, run, cluster, stages, manifest.id, manifest.attempt)

    def __str__(self) -> str:
        return f"{self.id} of run {self.run[:8]}"


def checkpoint_set(checkpoints: Iterable[StageCheckpoint]) -> CheckpointSet:
    """Return the checkpoints of all stages as a set; ``StageFormatError`` says what is wrong.

    All files are read, for their digests.
    """
    by_stage: dict[int, StageCheckpoint] = {}
    cuts = set()
    for checkpoint in checkpoints:
        by_stage[checkpoint.manifest.stage] = checkpoint
        cuts.add(replace(_Cut.of(checkpoint.manifest), attempt=""))
    if len(cuts) != 1:
        found = ", ".join(sorted(map(str, cuts))) or "none"
        raise StageFormatError(f"the checkpoints must be of one update of one plan and run, not {found}")
    (cut,) = cuts
    if missing := _missing(cut, by_stage):
        raise StageFormatError(f"{cut} lacks the checkpoint of stage {missing[0]} of {cut.stages}")
    for checkpoint in by_stage.values():
        checkpoint.check()
    return CheckpointSet(tuple(by_stage[stage] for stage in range(cut.stages)))


def find_checkpoint_sets(folder: Path) -> dict[int, CheckpointSet]:
    """Return the newest complete checkpoints below a folder, ordered by cluster; all are of one plan.

    The folder contains the ``node_<i>`` folders of the nodes, as ``Node(checkpoint_folder=...)`` does.
    Replicas count. A damaged checkpoint is reported, and an earlier one used. ``StageFormatError`` if
    there is no complete one, or if there are several runs.
    """
    found: dict[_Cut, dict[int, list[StageCheckpoint]]] = {}
    for checkpoint in _stored_below(folder):
        stages = found.setdefault(_Cut.of(checkpoint.manifest), {})
        stages.setdefault(checkpoint.manifest.stage, []).append(checkpoint)
    newest: dict[tuple[str, str, int], CheckpointSet] = {}
    for cut in sorted(found, key=lambda each: each.id, reverse=True):
        line = (cut.plan, cut.run, cut.cluster)
        if line not in newest and not _missing(cut, found[cut]):
            chosen = _undamaged(cut, found[cut])
            if chosen is not None:
                newest[line] = chosen
    if not newest:
        raise StageFormatError(_explain_nothing(folder, found))
    _check_one_run(folder, newest)
    plan, _, _ = max(newest, key=lambda line: newest[line].id)
    of_plan = {cluster: chosen for (its, _, cluster), chosen in newest.items() if its == plan}
    return dict(sorted(of_plan.items()))


def _stored_below(folder: Path) -> Iterator[StageCheckpoint]:
    """Yield the checkpoints of the nodes below a folder, own ones before replicas."""
    nodes = sorted(path for path in folder.glob("node_*") if _NODE.fullmatch(path.name))
    replicas = [
        path
        for node in nodes
        for path in sorted(node.glob("replica_of_stage_*"))
        if _REPLICA.fullmatch(path.name)
    ]
    for path in (*nodes, *replicas):
        own = CheckpointFolder(path)
        for checkpoint in own.ids():
            try:
                yield StageCheckpoint(own.manifest(checkpoint), own.tensors_path(checkpoint))
            except StageFormatError as error:
                logger.warning("a checkpoint is damaged and not used: %s", error)


def _missing(cut: _Cut, stages: Iterable[int]) -> list[int]:
    """Return the stages that are not among ``stages``."""
    return sorted(set(range(cut.stages)) - set(stages))


def _undamaged(cut: _Cut, stages: dict[int, list[StageCheckpoint]]) -> CheckpointSet | None:
    """Return an undamaged checkpoint of every stage; None if a stage has none."""
    chosen = []
    for stage in range(cut.stages):
        usable = next(filter(_is_undamaged, stages[stage]), None)
        if usable is None:
            return None
        chosen.append(usable)
    return CheckpointSet(tuple(chosen))


def _is_undamaged(checkpoint: StageCheckpoint) -> bool:
    try:
        checkpoint.check()
    except (StageFormatError, OSError) as error:
        logger.warning("a checkpoint is damaged and not used: %s", error)
        return False
    return True


def _explain_nothing(folder: Path, found: dict[_Cut, dict[int, list[StageCheckpoint]]]) -> str:
    if not found:
        return (
            f"{folder} holds no checkpoints: name the folder that has the node_<i> folders of all nodes "
            "of a cluster"
        )
    cut = max(found, key=lambda each: each.id)
    missing = _missing(cut, found[cut])
    if not missing:
        return f"no checkpoint in {folder} is undamaged for all stages"
    return (
        f"{folder} lacks stage {', '.join(map(str, missing))} of {cut.stages} for {cut}: copy the "
        "node_<i> folders of all nodes of the cluster into it"
    )


def _check_one_run(folder: Path, newest: dict[tuple[str, str, int], CheckpointSet]) -> None:
    """Refuse to guess between runs: which of two was the last one is not stored."""
    runs: dict[int, dict[str, CheckpointId]] = {}
    for (_, run, cluster), chosen in newest.items():
        known = runs.setdefault(cluster, {})
        known[run] = max(chosen.id, known.get(run, chosen.id))
    for cluster, known in runs.items():
        if len(known) > 1:
            listed = ", ".join(f"{run[:8]} ({checkpoint})" for run, checkpoint in known.items())
            raise StageFormatError(
                f"{folder} holds several runs of cluster {cluster}: {listed}; leave only the folders of "
                "the run to continue"
            )
