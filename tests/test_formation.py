"""``clusterize`` from end to end: written files, log, replacement of earlier output, errors."""

import hashlib
import ipaddress
import json
import os
import re
import shutil
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from torch import nn

import ravnest
from ravnest import clusterize, formation
from ravnest.errors import CaptureError, ExactnessError, NodeConfigError, PlanError, SplitError
from ravnest.plan.plan import Plan
from ravnest.split import Chain, PreparedModel
from ravnest.store.bundle import load_module, load_stage
from ravnest.store.file_set import finish_replacement
from ravnest.store.node_spec import NodeSpec, read_node
from ravnest.types import Role


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.norm(self.first(x))))))


class Tied(nn.Module):
    """Embedding and output layer are one parameter."""

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


def configure(folder: Path, *addresses: str, ram: float = 1) -> Path:
    """Write a pool of equal nodes and return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = ",\n".join(
        f'    "{number}": {{"IP": "{address}", "benchmarks": {{"ram": {ram}, "bandwidth": 100}}}}'
        for number, address in enumerate(addresses)
    )
    (folder / "node_configs.json").write_text(f"{{\n{entries}\n    // as the documentation shows\n}}\n")
    return folder


def local(count: int) -> list[str]:
    return [f"127.0.0.1:{8080 + number}" for number in range(count)]


def listing(folder: Path) -> list[str]:
    """Return every file and empty folder below ``folder``, including hidden ones."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() or not any(path.iterdir())
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in listing(folder) if (folder / name).is_file()}


def expected_files(plan: Plan) -> set[str]:
    """Return the documented files of a plan."""
    files = {"plan.json", "certificates/authority.pem"}
    for stage in plan.stages:
        name = f"node_{stage.node.id}"
        files |= {f"certificates/{name}.pem", f"certificates/{name}.key", f"nodes/{name}.json"}
        files |= {f"cluster_{stage.cluster}/{name}/{f}" for f in ("stage.json", "weights.safetensors")}
    return files


def nodes_of(folder: Path) -> dict[int, NodeSpec]:
    names = [path.stem for path in (folder / "nodes").glob("*.json")]
    return {node.node: node for node in (read_node(folder, name) for name in names)}


def check_whole(folder: Path) -> None:
    """Check that every node's stage exists with its digest and that all belong to one plan."""
    nodes = nodes_of(folder)
    plan = json.loads((folder / "plan.json").read_bytes())
    assert {node.plan for node in nodes.values()} == {plan["plan"]}
    for node in nodes.values():
        stage = load_stage(folder / node.bundle, node.sha256)
        assert (stage.spec.index, stage.spec.count) == (node.stage, node.stages)
    found = set(listing(folder)) - {"node_configs.json", "plan.json"}
    assert found == set(plan["files"])


@dataclass(frozen=True)
class Result:
    model: nn.Module
    folder: Path
    plan: Plan
    log: str
    nodes: dict[int, NodeSpec]


ADDRESSES = ("0.0.0.0:8080", "10.1.2.3:8081", "gpu.example.org:9000", "[::1]:8083")
EXAMPLE = torch.arange(24).reshape(8, 3) % 13


def formed(folder: Path, model: nn.Module, prepared: PreparedModel, clusters: int) -> Result:
    """Run ``clusterize`` for four nodes with a model that was captured before."""
    torch.manual_seed(11)
    configure(folder, *ADDRESSES)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as log:
        patch.setattr(formation, "prepare", lambda *_, **__: prepared)
        plan = clusterize(model, clusters=clusters, folder=folder)
    return Result(model, folder, plan, log.getvalue(), nodes_of(folder))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Output for four nodes in two clusters (twice) and in three."""
    torch.manual_seed(7)
    model, folder = Tied(), tmp_path_factory.mktemp("formed")
    prepared = formation.prepare(model, (EXAMPLE,))
    counts = {"two clusters": 2, "once more": 2, "three clusters": 3}
    return {name: formed(folder / name, model, prepared, count) for name, count in counts.items()}


@pytest.fixture(params=["two clusters", "three clusters"])
def result(request: pytest.FixtureRequest, results: dict[str, Result]) -> Result:
    return results[request.param]


# --- written files -------------------------------------------------------------------------------


def test_the_documented_files_are_written(result: Result) -> None:
    assert set(listing(result.folder)) == expected_files(result.plan) | {"node_configs.json"}
    check_whole(result.folder)


def test_node_specs_describe_the_plan(result: Result) -> None:
    assert sorted(result.nodes) == [0, 1, 2, 3]
    for number, node in result.nodes.items():
        stage = result.plan.stage_of(number)
        cluster = result.plan.clusters[node.cluster]
        assert stage.cluster == node.cluster
        assert (node.stage, node.stages) == (stage.index, len(cluster.stages))
        assert node.role is Role.at(node.stage, node.stages)
        assert node.address == ADDRESSES[number]
        assert node.bundle == f"cluster_{node.cluster}/node_{number}"
        assert node.seed == 11
        assert node.update_frequency == 1
        assert (node.schedule, node.in_flight) == (result.plan.schedule, cluster.in_flight)
        assert (node.microbatch_rows, node.split_reason) == (None, cluster.split_reason)


def test_node_specs_have_the_documented_fields(result: Result) -> None:
    data = json.loads((result.folder / "nodes" / "node_0.json").read_bytes())
    assert (data["format"], data["version"]) == ("ravnest-node", 2)
    fields = {"plan", "node", "cluster", "stage", "stages", "role", "address", "previous", "next"}
    fields |= {"pipeline", "roots", "rings", "bundle", "sha256", "seed", "in_flight", "schedule"}
    fields |= {
        "loss_chunks",
        "microbatches",
        "microbatch_rows",
        "delay_fits",
        "outage",
        "others",
        "generation",
        "dials_next",
        "dials_previous",
        "secret",
        "samples",
        "defers",
        "relay",
        "splittable",
        "batch_size",
        "largest_rows",
        "tight",
        "kept",
        "smallest_rows",
        "split_reason",
        "update_frequency",
        "certificates",
    }
    assert set(data) == fields | {"format", "version"}


def test_neighbours_form_the_pipelines(result: Result) -> None:
    roots = [cluster.stages[0].node.id for cluster in result.plan.clusters]
    for cluster in result.plan.clusters:
        nodes = [result.nodes[stage.node.id] for stage in cluster.stages]
        for node in nodes:
            assert node.pipeline == tuple(each.node for each in nodes)
            assert [(r.node, r.address) for r in node.roots] == [
                (root, result.nodes[root].address) for root in roots
            ]
        assert nodes[0].previous is None
        assert nodes[-1].next is None
        for before, after in pairwise(nodes):
            assert before.next is not None
            assert after.previous is not None
            assert (before.next.node, before.next.address) == (after.node, after.address)
            assert (after.previous.node, after.previous.address) == (before.node, before.address)


def test_each_ring_has_one_owner_in_each_cluster(result: Result) -> None:
    rings = {ring.id: ring for node in result.nodes.values() for ring in node.rings}
    assert sorted(rings) == list(range(len(rings)))
    names = [name for ring in rings.values() for name in ring.names]
    averaged = [key for key in result.model.state_dict() if key != "norm.num_batches_tracked"]
    averaged.remove("head.weight")  # tied: averaged once, as embed.weight
    assert sorted(names) == sorted(averaged), "each tensor is in one ring"
    specs = {n: load_stage(result.folder / node.bundle).spec for n, node in result.nodes.items()}
    for ring in rings.values():
        assert [result.nodes[m.node].cluster for m in ring.members] == list(
            range(len(result.plan.clusters))
        )
        for member in ring.members:
            node = result.nodes[member.node]
            assert ring in node.rings
            assert member.address == node.address
            owned = {e.key for e in specs[node.node].state if e.stages[0] == node.stage}
            assert set(ring.names) <= owned, f"node {node.node} does not own all of ring {ring.id}"
    for node in result.nodes.values():
        assert all(node.node in [m.node for m in ring.members] for ring in node.rings)


def test_a_tied_weight_is_owned_by_the_stage_nearest_the_root(result: Result) -> None:
    across = 0
    for cluster in result.plan.clusters:
        stages = [load_stage(result.folder / result.nodes[s.node.id].bundle) for s in cluster.stages]
        entries = [e for s in stages for e in s.spec.state if e.key == "embed.weight"]
        assert all(e.names == ("embed.weight", "head.weight") for e in entries)
        assert {e.stages for e in entries} == {entries[0].stages}
        assert entries[0].stages[0] == 0
        assert len(entries[0].stages) == len(entries)
        across += len(entries) > 1
    assert across == sum(len(cluster.stages) > 1 for cluster in result.plan.clusters)


def test_every_cluster_computes_what_the_model_computes(result: Result) -> None:
    state = result.model.state_dict()
    with torch.no_grad():
        expected = result.model.eval()(EXAMPLE)
    result.model.train()
    for cluster in result.plan.clusters:
        nodes = [result.nodes[stage.node.id] for stage in cluster.stages]
        chain = Chain(load_module(result.folder / n.bundle, n.sha256) for n in nodes).eval()
        with torch.no_grad():
            assert torch.equal(chain(EXAMPLE), expected)
        fused = chain.state_dict()
        assert list(fused) == list(state)
        assert all(torch.equal(fused[key], state[key]) for key in state)


def test_digests_cover_graph_and_weights(result: Result) -> None:
    for node in result.nodes.values():
        stage = (result.folder / node.bundle / "stage.json").read_bytes()
        assert hashlib.sha256(stage).hexdigest() == node.sha256
        weights = (result.folder / node.bundle / "weights.safetensors").read_bytes()
        assert json.loads(stage)["weights"]["sha256"] == hashlib.sha256(weights).hexdigest()


def test_a_repeated_call_gives_the_same_plan(results: dict[str, Result]) -> None:
    first, again, other = (results[n] for n in ("two clusters", "once more", "three clusters"))
    assert again.log == first.log
    digests = [{node.plan for node in result.nodes.values()} for result in (first, again, other)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1
    assert digests[0] != digests[2]


# --- log -----------------------------------------------------------------------------------------


def expected_block(node: NodeSpec) -> str:
    following: dict[str, list[str]] = {}
    for ring in node.rings:
        place = [member.node for member in ring.members].index(node.node)
        member = ring.members[(place + 1) % len(ring.members)]
        if member.node != node.node:
            following.setdefault(member.address, []).append(ring.names[0])
    params = {address: n[0] if len(n) == 1 else n for address, n in following.items()}
    return (
        f"Node({node.node}, Cluster({node.cluster})) \n"
        f"self.IP({node.address}) \n"
        f"Ring IDs({ {ring.id: ring.names[0] for ring in node.rings} }) \n"
        f"Address2Param({params})"
    )


def test_the_log_lists_nodes_then_clusters_then_roles(result: Result) -> None:
    *blocks, clusters, roles = result.log.removesuffix("\n").split("\n\n\n")
    order = sorted(result.nodes.values(), key=lambda node: (node.cluster, node.stage))
    assert blocks == [expected_block(node) for node in order]
    assert clusters.splitlines() == [
        f"Cluster {cluster.id} : " + " -> ".join(f"Node({s.node.id})" for s in cluster.stages)
        for cluster in result.plan.clusters
    ]
    assert roles.splitlines() == [f"Node({n}) -> {result.nodes[n].role}" for n in range(4)]


def test_rings_that_share_their_next_member_are_listed_together(result: Result) -> None:
    shared = [match for match in re.findall(r"Address2Param\((.*)\)", result.log) if "[" in match]
    if len(result.plan.clusters) == 2:
        assert not [match for match in shared if "['" in match]
    else:
        assert any(re.search(r"'\S+': \['\w+\.weight', '\w+\.weight'\]", match) for match in shared)


def test_the_log_of_one_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(tmp_path, *local(2))
    ravnest.set_seed(42)
    clusterize(model=Small(), example_args=(torch.rand(8, 4),), folder=tmp_path)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"Schedule async: .* computes statistics over the batch\.\n", err)
    assert out == (
        "Node(0, Cluster(0)) \n"
        "self.IP(127.0.0.1:8080) \n"
        "Ring IDs({0: 'first.weight'}) \n"
        "Address2Param({})\n"
        "\n\n"
        "Node(1, Cluster(0)) \n"
        "self.IP(127.0.0.1:8081) \n"
        "Ring IDs({1: 'second.weight'}) \n"
        "Address2Param({})\n"
        "\n\n"
        "Cluster 0 : Node(0) -> Node(1)\n"
        "\n\n"
        "Node(0) -> Root\n"
        "Node(1) -> Leaf\n"
    )
    assert read_node(tmp_path, "node_1").seed == 42


def test_several_clusters_are_told_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(tmp_path, *local(4))
    clusterize(model=Small(), example_args=(torch.rand(8, 4),), folder=tmp_path, clusters=2)
    told = capsys.readouterr().err
    assert "each makes about 1/2 of the updates of one process per epoch" in told
    assert "use about 2 times the learning rate of one process, or clusters=1." in told


# --- certificates --------------------------------------------------------------------------------


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_certificates_are_signed_by_the_plans_authority(result: Result) -> None:
    folder = result.folder / "certificates"
    authority = certificate(folder / "authority.pem")
    authority.verify_directly_issued_by(authority)
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    for node in result.nodes.values():
        paths = node.certificates
        assert result.folder / paths.authority == folder / "authority.pem"
        issued = certificate(result.folder / paths.certificate)
        issued.verify_directly_issued_by(authority)
        limits = issued.extensions.get_extension_for_class(x509.BasicConstraints).value
        assert not limits.ca
        usage = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
        assert issued.not_valid_before_utc < issued.not_valid_after_utc
        key = serialization.load_pem_private_key((result.folder / paths.key).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.public_key() == issued.public_key()
    assert sorted(path.name for path in folder.glob("*.key")) == [f"node_{n}.key" for n in range(4)]


def test_certificates_name_the_hosts_of_the_nodes(result: Result) -> None:
    hosts = []
    for number in range(4):
        issued = certificate(result.folder / "certificates" / f"node_{number}.pem")
        names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts.append(
            {str(ip) for ip in names.get_values_for_type(x509.IPAddress)}
            | set(names.get_values_for_type(x509.DNSName))
        )
    assert hosts == [
        {"node_0", "localhost", "127.0.0.1"},  # 0.0.0.0 is this machine
        {"node_1", "localhost", "10.1.2.3"},
        {"node_2", "localhost", "gpu.example.org"},
        {"node_3", "localhost", str(ipaddress.ip_address("::1"))},
    ]


def context(side: int, folder: Path, number: int) -> ssl.SSLContext:
    made = ssl.SSLContext(side)
    certificates = folder / "certificates"
    made.load_cert_chain(certificates / f"node_{number}.pem", certificates / f"node_{number}.key")
    made.load_verify_locations(certificates / "authority.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> ssl.SSLObject:
    """Do a TLS handshake in memory and return the server's side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    calling = client.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(4):
        for side in (calling, serving):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    calling.write(b"hello")
    assert serving.read() == b"hello"
    return serving


def test_only_nodes_of_one_plan_accept_each_other(results: dict[str, Result]) -> None:
    server = context(ssl.PROTOCOL_TLS_SERVER, results["two clusters"].folder, 1)
    client = context(ssl.PROTOCOL_TLS_CLIENT, results["two clusters"].folder, 3)
    peer = shake_hands(server, client, "10.1.2.3").getpeercert()
    assert peer is not None
    assert peer["subject"] == ((("commonName", "node_3"),),)
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        shake_hands(server, client, "10.1.2.4")
    other_plan = context(ssl.PROTOCOL_TLS_CLIENT, results["once more"].folder, 3)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.verify.failed"):
        shake_hands(server, other_plan, "10.1.2.3")


# --- many calls with one captured model ----------------------------------------------------------


@pytest.fixture(scope="module")
def prepared() -> Any:
    torch.manual_seed(5)
    return formation.prepare(Small(), (torch.rand(8, 4),))


@pytest.fixture(scope="module")
def plans() -> dict[Any, formation.Formation]:
    return {}


@pytest.fixture
def call(
    prepared: Any, plans: dict[Any, formation.Formation], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Plan]:
    """``clusterize`` with cached capture, check and plan."""
    form_clusters = formation.form_clusters

    def cached(*args: Any, nodes: tuple[Any, ...], clusters: int | None, **rest: Any) -> Any:
        key = nodes, clusters
        if key not in plans:
            plans[key] = form_clusters(*args, nodes=nodes, clusters=clusters, **rest)
        return plans[key]

    monkeypatch.setattr(formation, "prepare", lambda *_, **__: prepared)
    monkeypatch.setattr(formation, "verify", lambda *_, **__: None)
    monkeypatch.setattr(formation, "form_clusters", cached)
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def clusterize_again(folder: Path, clusters: int | None = None) -> Plan:
        with redirect_stdout(StringIO()):
            return clusterize(nn.Identity(), folder=folder, clusters=clusters)

    return clusterize_again


def test_only_the_owner_can_read_private_keys(tmp_path: Path, call: Callable[..., Plan]) -> None:
    configure(tmp_path, *local(2))
    old = os.umask(0)
    try:
        call(tmp_path)
        call(tmp_path)
    finally:
        os.umask(old)
    for path in (tmp_path / "certificates").iterdir():
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == 0o600 if path.suffix == ".key" else mode & 0o044, f"{path.name}: {mode:o}"


def test_each_call_creates_a_new_authority(tmp_path: Path, call: Callable[..., Plan]) -> None:
    configure(tmp_path, *local(2))
    keys = []
    for _ in range(2):
        call(tmp_path)
        keys.append(contents(tmp_path / "certificates"))
    assert all(keys[0][name] != keys[1][name] for name in keys[0])


# --- replacing an earlier output -----------------------------------------------------------------

USERS_FILES = {
    "notes.txt": b"mine",
    "node_configs.backup.json": b"{}",
    "plan.json.old": b"old",
    "nodes/README": b"mine",
    "nodes/node_x.json": b"mine",
    "cluster_0/results.csv": b"1,2,3",
    "cluster_0/node_1/notes.txt": b"mine",
    "cluster_0/node_2/notes.txt": b"mine",
    "cluster_7/node_0/stage.json": b"mine",
    "certificates/other.pem": b"mine",
    "empty/.keep": b"",
}


def add_users_files(folder: Path) -> None:
    for name, content in USERS_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def users_files_are_untouched(folder: Path) -> bool:
    return all((folder / name).read_bytes() == content for name, content in USERS_FILES.items())


def test_a_repeated_call_replaces_only_its_own_output(tmp_path: Path, call: Callable[..., Plan]) -> None:
    add_users_files(configure(tmp_path, *local(3)))
    for count, clusters in [(3, None), (4, 2), (1, None), (3, 3), (2, 1)]:
        configure(tmp_path, *local(count))
        configs = (tmp_path / "node_configs.json").read_bytes()
        plan = call(tmp_path, clusters)
        assert len(plan.stages) == count
        assert set(listing(tmp_path)) == expected_files(plan) | {"node_configs.json"} | set(USERS_FILES)
        assert (tmp_path / "node_configs.json").read_bytes() == configs
        assert users_files_are_untouched(tmp_path)


def test_uncached_calls_replace_their_output_too(tmp_path: Path) -> None:
    for addresses, model in [(local(3), Small()), (local(2), Small())]:
        configure(tmp_path, *addresses)
        with redirect_stdout(StringIO()):
            plan = clusterize(model, torch.rand(8, 4), folder=tmp_path, pass_data=True)
        check_whole(tmp_path)
        assert set(listing(tmp_path)) == expected_files(plan) | {"node_configs.json"}
        loaded = [read_node(tmp_path, f"node_{s.node.id}") for s in plan.clusters[0].stages]
        chain = Chain(load_module(tmp_path / node.bundle, node.sha256) for node in loaded)
        fused = chain.state_dict()
        assert all(torch.equal(fused[key], tensor) for key, tensor in model.state_dict().items())


def test_the_default_folder_is_node_data(
    tmp_path: Path, call: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path / "node_data", *local(2))
    monkeypatch.chdir(tmp_path)
    with redirect_stdout(StringIO()):
        clusterize(nn.Identity())
    check_whole(tmp_path / "node_data")
    assert [path.name for path in tmp_path.iterdir()] == ["node_data"]


# --- crashes -------------------------------------------------------------------------------------


class Killed(BaseException):
    """End of the process: no handler can write to the disk afterwards."""


STEPS = ("replace", "unlink", "rmdir", "mkdir")
"""Functions of ``os`` that change the folder; a crash is injected before one of these calls."""


class Crash:
    """Failure at the ``at``-th step, and if ``dead`` at every later step as well."""

    def __init__(self, at: int, dead: bool) -> None:
        self.at, self.dead, self.count = at, dead, 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.dead and self.count >= self.at:
                raise Killed
            if self.count == self.at:
                raise OSError(28, "No space left on device")
            return function(*args, **kwargs)

        return step


def crashed(patch: pytest.MonkeyPatch, run: Callable[[], object], crash: Crash) -> bool:
    """Return whether the crash stopped ``run``."""
    with patch.context() as patched:
        for name in STEPS:
            patched.setattr(os, name, crash.wrap(getattr(os, name)))
        try:
            run()
        except (Killed, OSError):
            return True
    return False


@pytest.fixture
def before(tmp_path: Path, call: Callable[..., Plan]) -> Path:
    """Output of an earlier call for two nodes in one cluster, next to files of the user."""
    folder = configure(tmp_path / "before", *local(2))
    call(folder, 1)
    add_users_files(folder)
    return folder


def visible(folder: Path) -> dict[str, bytes]:
    """Return the contents without our own files of an unfinished replacement, which start with a dot."""
    return {name: data for name, data in contents(folder).items() if not name.startswith(".")}


@pytest.mark.parametrize("dead", [False, True], ids=["error", "kill"])
@pytest.mark.parametrize("following", [1, 2], ids=["then the earlier", "then the same"])
def test_a_crash_at_any_step_can_be_recovered(
    before: Path,
    tmp_path: Path,
    call: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    dead: bool,
    following: int,
) -> None:
    """Replace one cluster by two, and stop the call at each of its steps in turn."""
    earlier, outcomes = visible(before), set()
    counter = Crash(at=-1, dead=False)
    crashed(monkeypatch, partial(call, Path(shutil.copytree(before, tmp_path / "count")), 2), counter)
    first, stride = following + 2 * dead, 4  # the four cases cover different steps, together all
    for at in range(first, counter.count + stride + 1, stride):
        folder = Path(shutil.copytree(before, tmp_path / f"at {at}"))
        stopped = crashed(monkeypatch, partial(call, folder, 2), Crash(at, dead))
        as_before = visible(folder) == earlier
        outcomes.add((stopped, as_before))
        assert users_files_are_untouched(folder)
        if not as_before:
            finished = Path(shutil.copytree(folder, tmp_path / f"finished {at}"))
            finish_replacement(finished)
            check_whole_next_to_users_files(finished, clusters=2)
        plan = call(folder, following)
        expected = expected_files(plan) | {"node_configs.json"} | set(USERS_FILES)
        assert set(listing(folder)) == expected, f"after a crash at step {at}"
        check_whole_next_to_users_files(folder, clusters=following)
    assert outcomes == {(True, True), (True, False), (False, False)}, "a kind of crash is missing"


def check_whole_next_to_users_files(folder: Path, clusters: int) -> None:
    assert users_files_are_untouched(folder)
    for name in USERS_FILES:
        (folder / name).unlink()
    for path in folder.glob(".ravnest-staging-*"):
        shutil.rmtree(path)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    check_whole(folder)
    assert len({node.cluster for node in nodes_of(folder).values()}) == clusters


def test_a_failure_while_a_stage_is_written_leaves_the_earlier_output(
    before: Path, call: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = contents(before)
    written = 0
    save_stage = formation.save_stage

    def fail(*args: Any) -> Any:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(28, "No space left on device")
        return save_stage(*args)

    monkeypatch.setattr(formation, "save_stage", fail)
    with pytest.raises(OSError, match="No space left"):
        call(before, 2)
    assert contents(before) == earlier


# --- errors --------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if x.sum() > 0 else x


def unequal(*_: object, **__: object) -> None:
    raise ExactnessError("the stages compute something else")


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[Path]:
    """A folder with files of the user that must not change during the test."""
    folder = configure(tmp_path / "node_data", *local(2))
    add_users_files(folder)
    earlier = contents(folder)
    yield folder
    assert contents(folder) == earlier, "something was written"


def test_a_model_that_cannot_be_captured_writes_nothing(untouched: Path) -> None:
    with pytest.raises(CaptureError, match=r"test_formation\.py"):
        clusterize(Branching(), torch.rand(8, 4), folder=untouched)


def test_stages_that_differ_from_the_model_are_not_written(
    untouched: Path, prepared: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formation, "prepare", lambda *_, **__: prepared)
    monkeypatch.setattr(formation, "verify", unequal)
    with pytest.raises(ExactnessError):
        clusterize(nn.Identity(), folder=untouched)
    assert capsys.readouterr().out == "", "a plan was printed that does not exist"


def bytes_of(amount: str) -> float:
    number, unit = amount.split()
    return float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def test_too_little_ram_is_refused_with_the_amounts(tmp_path: Path, call: Callable[..., Plan]) -> None:
    configure(tmp_path, *local(3), ram=1e-6)
    with pytest.raises(ValueError, match=r"^the model needs ") as caught:
        call(tmp_path)
    assert isinstance(caught.value, PlanError)
    amounts = re.search(
        r"needs (\S+ [kMG]B) to train at batch 8; the 3 nodes of node_configs\.json offer (\S+ [kMG]B)",
        str(caught.value),
    )
    assert amounts, caught.value
    needed, offered = (bytes_of(amount) for amount in amounts.groups())
    assert offered == 3000
    assert needed > offered
    assert listing(tmp_path) == ["node_configs.json"]


@pytest.mark.parametrize(("clusters", "says"), [(0, "choose 1 to 2"), (3, "choose 1 to 2")])
def test_an_impossible_number_of_clusters_is_refused(
    untouched: Path, call: Callable[..., Plan], clusters: int, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        call(untouched, clusters)


def test_a_model_is_needed(untouched: Path) -> None:
    with pytest.raises(SplitError, match=r"clusterize needs the model.*clusterize\(model="):
        clusterize(example_args=torch.rand(8, 4), folder=untouched)


def test_missing_node_configs_are_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(
        NodeConfigError, match=r"node_configs\.json does not exist[^\0]*\"IP\""
    ) as caught:
        clusterize(Small(), torch.rand(8, 4), folder=tmp_path / "node_data")
    assert isinstance(caught.value, ValueError)
    assert listing(tmp_path) == []


def test_malformed_node_configs_write_nothing(untouched: Path) -> None:
    config = untouched / "node_configs.json"
    good = config.read_bytes()
    config.write_text('{"0": {"IP": "nowhere"}}')
    with pytest.raises(NodeConfigError, match=r'node_configs\.json: "0"\.IP'):
        clusterize(Small(), torch.rand(8, 4), folder=untouched)
    config.write_bytes(good)


def test_the_model_is_not_changed(tmp_path: Path) -> None:
    configure(tmp_path, *local(2))
    model = Small().eval()
    earlier = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with redirect_stdout(StringIO()):
        clusterize(model, torch.rand(8, 4), folder=tmp_path, pass_data=True)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(earlier[key], tensor) for key, tensor in model.state_dict().items())
