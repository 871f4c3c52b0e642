"""New plans of several clusters with real files: the rest of the epoch, and the mean of the states."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from seed_cases import TRAINING, World

from ravnest.errors import DataError, StageFormatError
from ravnest.provider.download import files_of
from ravnest.provider.job_dir import JobDir
from ravnest.provider.training import loader, remainder_rows
from ravnest.runtime.epoch_batches import begin_epoch
from ravnest.runtime.random_state import capture_random_state, restore_random_state
from ravnest.schemas.jobs import DataFile, DatasetFiles
from ravnest.schemas.providers import Assignment
from ravnest.server.assignments import needed_by
from ravnest.server.checkpoint_check import read_uploaded_manifest
from ravnest.server.complete_checkpoints import CompleteCheckpoint
from ravnest.server.scheduling.job_start import JobStart, OldCluster, job_starts
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.server.scheduling.remainder import RemainderError
from ravnest.server.scheduling.seeds import with_seeds
from ravnest.store.plain_data import decode
from ravnest.types import CheckpointId

ROWS, FILES = 90, 5


class Cluster:
    """A cluster of a plan that loads its batches like a provider's worker, and notes the samples."""

    def __init__(self, world: World, assignments: tuple[Assignment, ...], folder: Path) -> None:
        """``assignments``: those of the cluster. The files of Root and Leaf are fetched."""
        self.world, self.assignments = world, assignments
        self.loaders = {}
        for each in assignments:
            job_dir = JobDir(folder / each.id)
            for path, artifact in files_of(job_dir, each).items():
                if artifact in each.train.files:
                    assert artifact in needed_by(each)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(world.artifacts.path(artifact.sha256).read_bytes())
            found = loader(job_dir, each.train, TRAINING, shuffle=True)
            if found is not None:
                self.loaders[each.node_spec.stage] = found
        self.root = min(self.loaders)
        self.epoch = self.batches = 0
        self.trained: Counter[int] = Counter()
        self.since_average = 0
        self.seeded = assignments[0].seed
        if self.seeded is not None:
            manifest = read_uploaded_manifest(world.artifacts.path(self.seeded.manifest.sha256))
            position = decode(manifest.progress)["root"]
            assert (position["batches"], position["microbatches"], position["data"]) == (0, 0, "")
            self.epoch = position["epoch"]
            for each in self.loaders.values():
                restore_random_state(position["random"], [each])
        self._begin()

    def _begin(self) -> None:
        for each in self.loaders.values():
            begin_epoch(each, self.epoch)
        self.random = capture_random_state([self.loaders[self.root]])
        self.iterators = [iter(each) for each in self.loaders.values()]
        self.batches = 0

    def train(self, batches: int) -> None:
        while batches and self.epoch < TRAINING.epochs:
            loaded = [next(each, None) for each in self.iterators]
            if loaded[0] is None:
                assert all(each is None for each in loaded)
                self.epoch += 1
                self._begin()
                continue
            rows = _rows(loaded)
            self.trained.update(rows)
            self.since_average += len(rows)
            self.batches += 1
            batches -= 1

    def checkpoint(self, update: int, change: float) -> CompleteCheckpoint:
        root: dict[str, Any] = {
            "epoch": self.epoch,
            "batches": self.batches,
            "microbatches": self.batches,
            "samples": 0,
            "data": "d",
            "random": self.random,
            "ended": False,
        }
        cut = CheckpointId(update, self.epoch)
        return self.world.checkpoint(
            self.assignments, change=change, cut=cut, root=root, samples=self.since_average
        )

    def old(self, update: int, change: float, *, is_current: bool = True) -> OldCluster:
        data = self.assignments[0].train
        assert data.first is not None
        rows = range(data.first, data.first + data.samples)
        return OldCluster(self.checkpoint(update, change), rows, is_current, data.remainder)


def _rows(loaded: list[Any]) -> list[int]:
    """Return the numbers of the samples of a batch, which Root and Leaf have loaded alike."""
    found = [batch["x"][:, 0] for batch in loaded if "x" in batch]
    found += [batch["labels"][:, 0] for batch in loaded if "labels" in batch]
    assert all(torch.equal(each, found[0]) for each in found)
    return [int(each) for each in found[0]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def data(world: World, tmp_path: Path) -> DatasetFiles:
    """Samples that hold their own number, in several files."""
    found: dict[str, list[DataFile]] = {"x": [], "labels": []}
    for name, width in (("x", 6), ("labels", 3)):
        for number in range(FILES):
            rows = torch.arange(ROWS // FILES * number, ROWS // FILES * (number + 1)).float()
            path = tmp_path / f"{name}{number}"
            save_file({name: rows[:, None].repeat(1, width)}, path)
            found[name].append(DataFile(artifact=world.artifacts.add(path), rows=len(rows)))
    return DatasetFiles(samples=ROWS, inputs=tuple(found["x"]), labels=tuple(found["labels"]))


def clusters_of(
    world: World, planned: PlannedJob, assignments: tuple[Assignment, ...], folder: Path
) -> Iterator[Cluster]:
    by_node = {each.node: each for each in assignments}
    for each in planned.plan.clusters:
        yield Cluster(world, tuple(by_node[stage.node.id] for stage in each.stages), folder)


def begun(world: World, data: DatasetFiles, folder: Path, providers: int, count: int) -> list[Cluster]:
    planned = world.planned(providers, count, data)
    assert len(planned.plan.clusters) == count
    return list(clusters_of(world, planned, world.ship(planned), folder))


def moved(
    world: World,
    data: DatasetFiles,
    folder: Path,
    old: list[OldCluster],
    providers: int,
    count: int,
    **training: Any,
) -> list[Cluster]:
    """Ship a new plan that starts where these clusters were; ``training``: settings that differ."""
    attempt = int(folder.name)
    (start, *_) = job_starts(
        [each.checkpoint for each in old], {}, dict.fromkeys(range(count), ()), before=old
    )
    planned = replace(world.planned(providers, count, data), attempt=attempt, start=start)
    changed = planned.spec.training.model_copy(update=training)
    planned = replace(planned, spec=planned.spec.model_copy(update={"training": changed}))
    assert len(planned.plan.clusters) == count
    shipped = world.ship(planned)
    seeded = with_seeds(shipped, planned, world.units, world.artifacts, world.scratch)
    return list(clusters_of(world, planned, seeded, folder))


def test_no_sample_is_left_out_or_trained_twice_over_three_plans(
    world: World, data: DatasetFiles, tmp_path: Path
) -> None:
    trained: Counter[int] = Counter()
    clusters = begun(world, data, tmp_path / "0", 4, 3)
    for each, batches in zip(clusters, (5, 9, 2), strict=True):
        each.train(batches)
    old = [each.old(5 + number, 0.0) for number, each in enumerate(clusters)]
    trained += sum((each.trained for each in clusters), Counter())
    clusters = moved(world, data, tmp_path / "1", old, 3, 2)
    rest = [each.assignments[0].train.remainder for each in clusters]
    assert all(each is not None and each.epoch == 1 for each in rest), (
        "cluster 1 was in its second epoch"
    )
    assert all(len(each.inputs) < FILES for each in rest if each), "not all files"
    for each in clusters:
        each.train(3)
    old = [each.old(20 + number, 0.0) for number, each in enumerate(clusters)]
    trained += sum((each.trained for each in clusters), Counter())
    (last,) = moved(world, data, tmp_path / "2", old, 2, 1)
    last.train(10**6)
    trained += last.trained
    assert set(trained) == set(range(ROWS))
    assert set(trained.values()) == {TRAINING.epochs}


def test_the_state_is_the_mean_by_samples(world: World, data: DatasetFiles, tmp_path: Path) -> None:
    one, other = begun(world, data, tmp_path / "0", 2, 2)
    one.train(6)
    other.train(2)
    (new,) = moved(world, data, tmp_path / "1", [one.old(6, 1.0), other.old(2, 5.0)], 2, 1)
    expected = {name: tensor + 2.0 for name, tensor in world.model.state_dict().items()}
    for each in new.assignments:
        assert each.seed is not None
        assert each.seed.id == CheckpointId(6, 0)
        manifest = read_uploaded_manifest(world.artifacts.path(each.seed.manifest.sha256))
        tensors = load_file(world.artifacts.path(each.seed.tensors.sha256))
        for key, stored in manifest.tensors.items():
            assert torch.allclose(tensors[f"state/{key}"], expected[stored.name]), "24 and 8 samples"
            momentum = tensors[f"optimizer/{key}/momentum_buffer"]
            own = 2 * (world.model.state_dict()[stored.name] + 1.0)
            assert torch.equal(momentum, own), "without average_optim that of the newest"
        progress = decode(manifest.progress)
        assert progress["averaging_samples"] == 0
        assert progress["updates"]["done"] == 6


def test_a_job_with_a_robust_mean_starts_from_it(
    world: World, data: DatasetFiles, tmp_path: Path
) -> None:
    clusters = begun(world, data, tmp_path / "0", 4, 3)
    for each, batches in zip(clusters, (6, 2, 2), strict=True):
        each.train(batches)
    old = [each.old(6, change) for each, change in zip(clusters, (500.0, 1.0, 2.0), strict=True)]
    (new,) = moved(world, data, tmp_path / "1", old, 2, 1, robust_mean="trimmed")
    expected = {name: tensor + 2.0 for name, tensor in world.model.state_dict().items()}
    for each in new.assignments:
        assert each.seed is not None
        manifest = read_uploaded_manifest(world.artifacts.path(each.seed.manifest.sha256))
        tensors = load_file(world.artifacts.path(each.seed.tensors.sha256))
        for key, stored in manifest.tensors.items():
            assert torch.allclose(tensors[f"state/{key}"], expected[stored.name]), "the middle one"


def test_a_cluster_that_missed_rounds_is_left_out_and_its_samples_are_trained_again(
    world: World, data: DatasetFiles, tmp_path: Path
) -> None:
    live, lost = begun(world, data, tmp_path / "0", 2, 2)
    live.train(6)
    lost.train(4)
    lost.since_average = 8
    old = [live.old(6, 1.0), lost.old(4, 5.0, is_current=False)]
    (new,) = moved(world, data, tmp_path / "1", old, 2, 1)
    rest = new.assignments[0].train.remainder
    assert rest is not None
    assert rest.samples == ROWS - 24 - 8, "half of what the lost cluster has trained"
    tensors = load_file(world.artifacts.path(new.assignments[0].seed.tensors.sha256))  # type: ignore[union-attr]
    first = next(iter(world.model.state_dict().values()))
    assert any(torch.equal(each, first + 1.0) for each in tensors.values() if each.shape == first.shape)


def test_at_the_end_of_an_epoch_nothing_is_left(
    world: World, data: DatasetFiles, tmp_path: Path
) -> None:
    clusters = begun(world, data, tmp_path / "0", 2, 2)
    for each in clusters:
        each.train(len(each.loaders[0]))
    old = [each.old(9, 0.0) for each in clusters]
    (new,) = moved(world, data, tmp_path / "1", old, 1, 1)
    assert new.assignments[0].train.remainder is None
    assert new.epoch == 1
    assert new.assignments[0].seed is not None
    assert new.assignments[0].seed.phase == 1


def test_without_the_state_of_a_generator_the_epoch_begins_anew(
    world: World, data: DatasetFiles, tmp_path: Path
) -> None:
    clusters = begun(world, data, tmp_path / "0", 2, 2)
    for each in clusters:
        each.train(2)
        each.random = {}
    old = [each.old(2, 0.0) for each in clusters]
    with pytest.raises(RemainderError, match="lacks the state"):
        moved(world, data, tmp_path / "1", old, 1, 1)
    starts = job_starts([each.checkpoint for each in old], {}, {0: ()}, before=old)
    assert [bool(each.before) for each in starts] == [True, False, False]
    assert starts[1].restart_epoch
    assert isinstance(starts[1], JobStart)
    assert issubclass(RemainderError, StageFormatError), "the next start is tried"


def test_numbers_of_samples_that_are_not_there_are_refused(
    world: World, data: DatasetFiles, tmp_path: Path
) -> None:
    clusters = begun(world, data, tmp_path / "0", 2, 2)
    clusters[0].train(2)
    old = [each.old(2, 0.0) for each in clusters]
    (new,) = moved(world, data, tmp_path / "1", old, 1, 1)
    rest = new.assignments[0].train.remainder
    assert rest is not None
    job_dir = JobDir(tmp_path / "1" / new.assignments[0].id)
    assert len(remainder_rows(job_dir, rest, ROWS)) == rest.samples
    with pytest.raises(DataError, match="names samples that are not there"):
        remainder_rows(job_dir, rest, 5)
    job_dir.rows_file(rest.rows).write_bytes(b"\0" * 7)
    with pytest.raises(DataError, match="has 7 bytes"):
        remainder_rows(job_dir, rest, ROWS)
