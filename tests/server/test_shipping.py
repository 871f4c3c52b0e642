"""Planning and shipping: stages and rows of each provider, compared with ``clusterize``."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ravnest import clusterize, formation
from ravnest.errors import JobError
from ravnest.jobs.model import UnitModel, pack_model, read_units
from ravnest.plan.cost import ModelCosts
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.profiler import profile_model
from ravnest.plan.row_cuts import row_cut_models
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import (
    DataFile,
    DatasetFiles,
    JobSpec,
    ModelFiles,
    NamedComponent,
    TrainingSpec,
)
from ravnest.schemas.providers import Assignment, DataShare, ProviderOffer, RowRange
from ravnest.server.scheduling.planning import PlannedJob, plan_job, plan_variants
from ravnest.server.scheduling.shipping import ship
from ravnest.split import Chain, PreparedModel
from ravnest.split.splitter import prepare
from ravnest.store.bundle import load_module, load_stage
from ravnest.store.files import sha256_of
from ravnest.store.node_spec import read_node, write_node

steady = settings(deadline=None, derandomize=True, max_examples=30)


class Tied(nn.Module):
    """Model whose embedding and output layer share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(self.embed(tokens).mean(1))))
        return self.head(torch.relu(self.second(hidden)))


EXAMPLE = torch.arange(24).reshape(8, 3) % 13


@dataclass(frozen=True)
class Packed:
    model: nn.Module
    prepared: PreparedModel
    units: UnitModel
    weights: Path


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    torch.manual_seed(7)
    model = Tied()
    prepared = prepare(model, (EXAMPLE,))
    files = pack_model(prepared, profile_model(prepared), tmp_path_factory.mktemp("packed"))
    return Packed(model, prepared, read_units(files.units), files.weights)


def artifact(name: str) -> Artifact:
    return Artifact(sha256=hashlib.sha256(name.encode()).hexdigest(), size=1)


def data(name: str, rows: list[int], label_rows: list[int] | None = None) -> DatasetFiles:
    """Data in files with these row counts."""

    def pieces(kind: str, cut: list[int]) -> tuple[DataFile, ...]:
        return tuple(
            DataFile(artifact=artifact(f"{name}/{kind}/{n}"), rows=count) for n, count in enumerate(cut)
        )

    return DatasetFiles(
        samples=sum(rows),
        inputs=pieces("inputs", rows),
        labels=pieces("labels", label_rows or rows),
    )


def job(training: dict[str, Any] | None = None, **settings: Any) -> JobSpec:
    sgd = {
        "optimizer": NamedComponent(name="SGD"),
        "loss": NamedComponent(name="CrossEntropyLoss"),
        "seed": 11,
    }
    return JobSpec(
        name="test",
        model=ModelFiles(units=artifact("units"), weights=artifact("weights")),
        training=TrainingSpec(**sgd | (training or {})),
        **{"train": data("train", [7, 7, 6]), **settings},
    )


def offer(address: str, ram: float = 1.0, compute: float = 50.0) -> ProviderOffer:
    return ProviderOffer(
        name=address,
        address=address,
        ram=ram,
        cores=1,
        compute=compute,
        bandwidth=100.0,
        round_trip=0.01,
        version="0",
        torch="0",
    )


def local(count: int, **measured: float) -> list[tuple[str, ProviderOffer]]:
    return [(f"p{n}", offer(f"127.0.0.1:{9000 + n}", **measured)) for n in range(count)]


def planned_for(spec: JobSpec, packed: Packed, providers: list[tuple[str, ProviderOffer]]) -> PlannedJob:
    planned = plan_job(spec, packed.units.profile, providers)
    assert isinstance(planned, PlannedJob), planned
    return planned


def adder(folder: Path) -> Callable[[Path], Artifact]:
    """Function that moves files into a folder, by digest."""

    def add(file: Path) -> Artifact:
        found = Artifact(sha256=sha256_of(file), size=file.stat().st_size)
        shutil.move(file, folder / found.sha256)
        return found

    return add


def shipped(planned: PlannedJob, packed: Packed, folder: Path) -> tuple[Assignment, ...]:
    return ship("j1", planned, packed.units, packed.weights, adder(folder), folder)


def rows(share: tuple[RowRange, ...], pieces: tuple[DataFile, ...]) -> list[int]:
    """Numbers of the samples in row ranges."""
    begins = accumulate((piece.rows for piece in pieces), initial=0)
    begin_of = {piece.artifact: begin for piece, begin in zip(pieces, begins, strict=False)}
    return [begin_of[s.artifact] + row for s in share for row in range(s.start, s.stop)]


def test_tensors_are_cut_along_their_rows_if_nothing_else_fits(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(4096, 32), nn.Linear(32, 4))
    tokens = torch.arange(8)
    prepared = prepare(model, (tokens,))
    profile = profile_model(prepared)
    cut = row_cut_models(prepared, profile, counts=(2, 4))
    files = pack_model(prepared, profile, tmp_path / "packed", cut)
    units = read_units(files.units)
    profiles = [variant.profile for variant in units.variants]

    large = plan_variants(job(clusters=1), profiles, local(3, ram=0.01))
    assert isinstance(large, PlannedJob)
    assert large.variant == 0
    few = plan_variants(job(clusters=1), profiles, local(3, ram=0.0005))
    assert isinstance(few, Infeasible)
    assert few == plan_job(job(clusters=1), profile, local(3, ram=0.0005))

    planned = plan_variants(job(clusters=1), profiles, local(3, ram=0.0018))
    assert isinstance(planned, PlannedJob)
    assert planned.variant == 1
    assert "0.weight (524 kB) is cut into 2 blocks of rows" in planned.explanation
    assignments = ship("j1", planned, units.variants[1], files.weights, adder(tmp_path), tmp_path)
    stages = []
    for assignment in assignments:
        folder = tmp_path / assignment.id
        folder.mkdir()
        shutil.copy(tmp_path / assignment.stage.sha256, folder / "stage.json")
        shutil.copy(tmp_path / assignment.weights.sha256, folder / "weights.safetensors")
        stages.append(load_module(folder, assignment.stage.sha256))
    chain = Chain(sorted(stages, key=lambda stage: stage.spec.index)).eval()
    assert torch.equal(chain(tokens), model.eval()(tokens))
    assert torch.equal(chain.state_dict()["0.weight"], model[0].weight)


# --- planning ------------------------------------------------------------------------------------


def test_nodes_are_the_providers_in_the_given_order(packed: Packed) -> None:
    planned = planned_for(job(), packed, local(3))
    assert planned.providers == ("p0", "p1", "p2")
    assert [str(s.node.address) for s in planned.plan.stages] == [
        f"127.0.0.1:{9000 + n}" for n in range(3)
    ]
    assert (planned.plan.seed, planned.plan.update_frequency) == (11, 1)


def test_the_job_sets_clusters_and_update_frequency(packed: Packed) -> None:
    planned = planned_for(job(clusters=2, training={"update_frequency": 3}), packed, local(4))
    assert len(planned.plan.clusters) == 2
    assert planned.plan.update_frequency == 3


def test_the_schedule_of_the_job_is_planned(packed: Packed) -> None:
    late = planned_for(job(training={"schedule": "async"}), packed, local(2)).plan
    exact = planned_for(job(training={"schedule": "sync"}), packed, local(2)).plan
    assert (late.schedule, exact.schedule) == ("async", "sync")
    assert late.stage_of(0).memory.versions + late.stage_of(1).memory.versions > 0
    assert exact.stage_of(0).memory.versions == exact.stage_of(1).memory.versions == 0


def test_the_explanation_names_the_layers_of_the_model(packed: Packed) -> None:
    words = planned_for(job(), packed, local(2)).explanation
    assert words.startswith("2 nodes in 1 cluster train about ")
    assert "Node(0) at 127.0.0.1:9000 is the Root: layer" in words
    assert "embed" in words
    assert "second" in words


def test_an_infeasible_job_names_what_it_needs_and_what_is_offered(packed: Packed) -> None:
    found = plan_job(job(), packed.units.profile, local(2, ram=1e-9))
    assert isinstance(found, Infeasible)
    assert found.reason.startswith("the model needs ")
    assert "kB to train at batch 8; 2 providers offer 0 kB. What helps:" in found.reason


def test_a_provider_that_is_too_small_is_left_out(packed: Packed) -> None:
    providers = [*local(2), ("small", offer("127.0.0.1:9100", ram=1e-9)), ("last", offer("[::1]:1"))]
    planned = planned_for(job(), packed, providers)
    assert planned.providers == ("p0", "p1", "last")
    assert [stage.node.id for stage in planned.plan.stages] == [0, 1, 2]


def test_the_reason_considers_all_useful_providers(packed: Packed) -> None:
    need = ModelCosts.of(packed.units.profile).smallest_total / 1e9
    providers = [*local(4, ram=need * 0.5), ("small", offer("127.0.0.1:9100", ram=1e-9))]
    found = plan_job(job(), packed.units.profile, providers)
    assert isinstance(found, Infeasible)
    assert "the largest of 4 providers has 2 kB" in found.reason
    found = plan_job(job(min_providers=5), packed.units.profile, providers)
    assert isinstance(found, Infeasible)
    assert "node 4 (0 kB) is too small for any stage" in found.reason


def test_surplus_providers_are_left_out(packed: Packed) -> None:
    units = len(packed.units.profile.units)
    planned = planned_for(job(clusters=1), packed, local(units + 2))
    assert planned.providers == tuple(f"p{n}" for n in range(units))
    found = plan_job(job(clusters=1, min_providers=units + 1), packed.units.profile, local(units + 2))
    assert isinstance(found, Infeasible)
    assert f"can be cut into at most {units} stages" in found.reason


def test_one_provider_per_address_is_used(packed: Packed) -> None:
    same = [
        ("a", offer("127.0.0.1:9000")),
        ("b", offer("127.0.0.1:9000")),
        ("c", offer("127.0.0.1:9001")),
    ]
    assert planned_for(job(), packed, same).providers == ("a", "c")
    found = plan_job(job(min_providers=3), packed.units.profile, same)
    assert isinstance(found, Infeasible)
    assert found.reason.endswith(
        "on at least 3 providers with different addresses; 2 such providers are idle"
    )
    few = plan_job(job(clusters=3), packed.units.profile, local(2))
    assert isinstance(few, Infeasible)
    assert "on at least 3 providers" in few.reason


def test_every_cluster_has_a_sample(packed: Packed) -> None:
    small = job(train=data("train", [2]), clusters=3)
    assert plan_job(small, packed.units.profile, local(4)) == Infeasible(
        "clusters=3 is too many: 2 samples are enough for 2"
    )
    free = job(train=data("train", [3]), training={"drop_last": True, "batch_size": 2})
    assert len(planned_for(free, packed, local(4)).plan.clusters) == 1


# --- shipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_node_specs_and_stages_equal_those_of_clusterize(
    packed: Packed, clusters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = [(str(n), offer(f"10.0.0.{n}:8080", ram=1 + n, compute=40 + n)) for n in range(4)]
    folder = tmp_path / "clusterize"
    folder.mkdir()
    entries = {
        str(n): {
            "IP": given.address,
            "benchmarks": {"ram": given.ram, "bandwidth": given.bandwidth, "compute": given.compute},
        }
        for n, (_, given) in enumerate(providers)
    }
    (folder / "node_configs.json").write_text(json.dumps(entries))
    monkeypatch.setattr(formation, "prepare", lambda *_, **__: packed.prepared)
    torch.manual_seed(11)
    with redirect_stdout(StringIO()):
        plan = clusterize(packed.model, clusters=clusters, folder=folder)

    planned = planned_for(job(clusters=clusters), packed, providers)
    assert planned.plan == plan
    (tmp_path / "artifacts").mkdir()
    assignments = shipped(planned, packed, tmp_path / "artifacts")
    assert [each.node for each in assignments] == [0, 1, 2, 3]
    for each in assignments:
        expected = json.loads((folder / "nodes" / f"node_{each.node}.json").read_bytes())
        write_node(tmp_path / "shipped", each.node_spec)
        ours = json.loads((tmp_path / "shipped" / "nodes" / f"node_{each.node}.json").read_bytes())
        theirs = dict(expected)
        assert theirs.pop("plan") != ours.pop("plan"), "the digest covers the job id"
        stage = load_stage(folder / f"cluster_{ours['cluster']}" / f"node_{each.node}")
        assert ours.pop("sha256") == each.stage.sha256
        assert len(ours.pop("secret")) == 64
        assert sum(ours.pop("samples")) == planned.spec.train.samples
        for only in ("sha256", "secret", "samples"):
            theirs.pop(only)
        assert ours == theirs
        bundle = tmp_path / ours["bundle"]
        unpack(each, tmp_path / "artifacts", bundle)
        mine = load_stage(bundle, each.stage.sha256)
        assert mine.tensors.keys() == stage.tensors.keys()
        assert all(torch.equal(mine.tensors[k], stage.tensors[k]) for k in mine.tensors)
    for cluster in plan.clusters:
        bundles = [tmp_path / f"cluster_{cluster.id}/node_{s.node.id}" for s in cluster.stages]
        chain = Chain(load_module(bundle) for bundle in bundles).eval()
        with torch.no_grad():
            assert torch.equal(chain(EXAMPLE), packed.model.eval()(EXAMPLE))


def unpack(assignment: Assignment, artifacts: Path, bundle: Path) -> None:
    bundle.mkdir(parents=True)
    shutil.copy(artifacts / assignment.stage.sha256, bundle / "stage.json")
    shutil.copy(artifacts / assignment.weights.sha256, bundle / "weights.safetensors")


def test_a_shipped_node_spec_can_be_written_and_read(packed: Packed, tmp_path: Path) -> None:
    for each in shipped(planned_for(job(), packed, local(2)), packed, tmp_path):
        received = Assignment.model_validate_json(each.model_dump_json())
        assert received == each
        write_node(tmp_path, received.node_spec)
        assert read_node(tmp_path, f"node_{each.node}") == each.node_spec


def test_assignments_of_a_job_share_a_plan_digest(packed: Packed, tmp_path: Path) -> None:
    planned = planned_for(job(), packed, local(2))
    assignments = shipped(planned, packed, tmp_path)
    assert [(each.id, each.job, each.node) for each in assignments] == [
        ("j1-0", "j1", 0),
        ("j1-1", "j1", 1),
    ]
    assert all(each.training == planned.spec.training for each in assignments)
    other = ship("j2", planned, packed.units, packed.weights, adder(tmp_path), tmp_path)
    plans = {each.node_spec.plan for each in assignments}
    assert len(plans) == 1
    assert plans != {each.node_spec.plan for each in other}, "nodes of two jobs must not connect"


def test_clusters_with_equal_cuts_share_their_files(packed: Packed, tmp_path: Path) -> None:
    calls: list[str] = []

    def add(file: Path) -> Artifact:
        calls.append(file.name)
        return adder(tmp_path)(file)

    planned = planned_for(job(clusters=4), packed, local(4))
    assignments = ship("j1", planned, packed.units, packed.weights, add, tmp_path)
    assert calls == ["stage.json", "weights.safetensors"]
    assert len({(each.stage.sha256, each.weights.sha256) for each in assignments}) == 1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "no temporary folder is left"


@pytest.mark.parametrize(
    ("addresses", "tls"),
    [
        (["127.0.0.1:9000", "127.0.0.2:9000"], False),
        (["localhost:9000", "[::1]:9000"], False),
        (["127.0.0.1:9000", "10.0.0.1:9000"], True),
        (["0.0.0.0:9000", "127.0.0.1:9001"], True),
    ],
)
def test_tls_unless_all_addresses_are_loopback(
    packed: Packed, addresses: list[str], tls: bool, tmp_path: Path
) -> None:
    providers = [(address, offer(address)) for address in addresses]
    assignments = shipped(planned_for(job(), packed, providers), packed, tmp_path)
    assert {each.tls for each in assignments} == {tls}


# --- data ----------------------------------------------------------------------------------------

pieces = st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda cut: sum(cut) >= 4)


def recut(rows: list[int], at: list[int]) -> list[int]:
    """Row counts for the same samples with other bounds."""
    bounds = sorted({0, sum(rows), *(each % sum(rows) for each in at)})
    return [after - before for before, after in pairwise(bounds)]


@steady
@given(
    pieces, st.lists(st.integers(0, 60), max_size=4), st.sampled_from([(1, 1), (3, 1), (4, 2), (4, 4)])
)
def test_each_sample_goes_to_exactly_one_cluster(
    packed: Packed,
    tmp_path_factory: pytest.TempPathFactory,
    cut: list[int],
    at: list[int],
    pool: tuple[int, int],
) -> None:
    count, clusters = pool
    train, validation = data("train", cut, recut(cut, at)), data("validation", recut(cut, at))
    spec = job(train=train, validation=validation, clusters=clusters)
    planned = planned_for(spec, packed, local(count))
    by_node = {e.node: e for e in shipped(planned, packed, tmp_path_factory.mktemp("shipped"))}
    everything = []
    for cluster in planned.plan.clusters:
        nodes = [by_node[stage.node.id] for stage in cluster.stages]
        own = rows(nodes[0].train.inputs, train.inputs)
        everything += own
        assert own
        assert rows(nodes[-1].train.labels, train.labels) == own, "Root and Leaf have the same rows"
        first, last = nodes[0].validation, nodes[-1].validation
        assert first is not None
        assert last is not None
        whole = list(range(validation.samples))
        assert rows(first.inputs, validation.inputs) == whole
        assert rows(last.labels, validation.labels) == whole
        for each in nodes:
            assert each.train.samples == len(own)
            assert each.validation is not None
            assert each.validation.samples == validation.samples
            shares: list[DataShare] = [each.train, each.validation]
            assert all(bool(share.inputs) == (each is nodes[0]) for share in shares)
            assert all(bool(share.labels) == (each is nodes[-1]) for share in shares)
    assert everything == list(range(train.samples)), "each sample once, in order"


@pytest.mark.parametrize("name", ["train", "validation"])
def test_inconsistent_row_counts_are_refused(packed: Packed, name: str) -> None:
    wrong = data(name, [5, 5]).model_copy(update={"samples": 11})
    with pytest.raises(JobError, match=f"the inputs of its {name} data have 10 rows, not 11"):
        plan_job(job(**{name: wrong}), packed.units.profile, local(2))
    wrong = data(name, [5, 5], [5, 4])
    with pytest.raises(JobError, match=f"the labels of its {name} data have 9 rows, not 10"):
        plan_job(job(**{name: wrong}), packed.units.profile, local(2))


def test_equal_clusters_get_equal_shares(packed: Packed, tmp_path: Path) -> None:
    planned = planned_for(job(train=data("train", [11]), clusters=4), packed, local(4))
    counts = [each.train.samples for each in shipped(planned, packed, tmp_path)]
    assert sorted(counts) == [2, 3, 3, 3]


def test_shares_are_proportional_to_predicted_rates(packed: Packed, tmp_path: Path) -> None:
    unequal = [*local(1, compute=150.0), *local(2, compute=50.0)[1:]]
    planned = planned_for(job(train=data("train", [400]), clusters=2), packed, unequal)
    fast, slow = planned.plan.clusters
    rates = replace(fast, samples_per_second=150.0), replace(slow, samples_per_second=50.0)
    planned = replace(planned, plan=replace(planned.plan, clusters=rates))
    shares = [each.train.samples for each in shipped(planned, packed, tmp_path)]
    assert sum(shares) == 400
    assert shares[0] == pytest.approx(300, abs=2)


def test_a_slow_cluster_gets_at_least_one_batch(packed: Packed, tmp_path: Path) -> None:
    unequal = [*local(1), *local(2, compute=1e-3)[1:]]
    spec = job(train=data("train", [40]), clusters=2, training={"batch_size": 8, "drop_last": True})
    counts = [
        each.train.samples for each in shipped(planned_for(spec, packed, unequal), packed, tmp_path)
    ]
    assert counts == [32, 8]


def test_a_job_without_validation_data(packed: Packed, tmp_path: Path) -> None:
    planned = planned_for(job(), packed, local(2))
    assert {each.validation for each in shipped(planned, packed, tmp_path)} == {None}


def test_nodes_on_other_machines_get_all_addresses_and_those_on_loopback_none(
    packed: Packed, tmp_path: Path
) -> None:
    remote = [
        (f"p{n}", offer(f"10.0.0.{n}:9000").model_copy(update={"addresses": (f"8.8.8.{n}:9000",)}))
        for n in range(2)
    ]
    spec = job(clusters=1, min_providers=2)
    assignments = shipped(planned_for(spec, packed, remote), packed, tmp_path)
    specs = [assignment.node_spec for assignment in assignments]
    assert sorted(each.address for each in specs) == ["10.0.0.0:9000", "10.0.0.1:9000"]
    for each in specs:
        neighbour = each.previous or each.next
        assert neighbour is not None
        assert each.others == (each.address.replace("10.0.0", "8.8.8"),)
        assert neighbour.others == (neighbour.address.replace("10.0.0", "8.8.8"),)
        assert each.relay is None
    assert len({each.plan for each in specs}) == 1
    near = shipped(planned_for(spec, packed, local(2)), packed, tmp_path)
    assert all(each.node_spec.others == () and not each.tls for each in near)


def test_providers_behind_two_routers_can_have_the_same_private_address(packed: Packed) -> None:
    public = [
        (f"p{n}", offer("192.168.1.10:9000").model_copy(update={"addresses": (f"8.8.8.{n}:9000",)}))
        for n in range(2)
    ]
    assert len(planned_for(job(min_providers=2), packed, public).providers) == 2
    same = [(name, public[0][1]) for name in ("a", "b")]
    assert isinstance(plan_job(job(min_providers=2), packed.units.profile, same), Infeasible)
