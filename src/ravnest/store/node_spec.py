"""What a provider needs to know to take its place: ``node_data/nodes/node_<i>.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ravnest.errors import StageFormatError
from ravnest.plan.plan import Plan, StagePlan
from ravnest.store.files import inside, read_json, write_json
from ravnest.types import Role

FORMAT = "ravnest-node"
VERSION = 1
_LIMIT = 64 << 20


@dataclass(frozen=True)
class NeighbourSpec:
    """A node that this one talks to."""

    node: int
    address: str


@dataclass(frozen=True)
class RingSpec:
    """A ring that this node is a member of."""

    id: int
    names: tuple[str, ...]
    members: tuple[NeighbourSpec, ...]
    """One for each cluster, in the order of the clusters."""


@dataclass(frozen=True)
class CertificateFiles:
    """Paths below node_data."""

    authority: str
    certificate: str
    key: str


@dataclass(frozen=True)
class NodeSpec:
    """One node's place in the plan."""

    plan: str
    """Digest of the whole plan; nodes of different plans refuse each other."""
    node: int
    cluster: int
    stage: int
    stages: int
    pipeline: tuple[int, ...]
    """The nodes of the cluster, Root first."""
    role: Role
    address: str
    previous: NeighbourSpec | None
    next: NeighbourSpec | None
    roots: tuple[NeighbourSpec, ...]
    """The Root of each cluster, in the order of the clusters."""
    rings: tuple[RingSpec, ...]
    bundle: str
    """Folder of the stage below node_data."""
    sha256: str
    """Digest of the bundle's ``stage.json``."""
    seed: int
    in_flight: int
    """Micro-batches that the Root keeps under way at the start."""
    in_flight_limit: int
    """The most that the memory of the cluster's nodes allows."""
    update_frequency: int
    certificates: CertificateFiles

    @property
    def name(self) -> str:
        """The name that ``Node(name=...)`` takes."""
        return f"node_{self.node}"


def node_path(folder: Path, node: int) -> Path:
    """Where a node's file is."""
    return folder / "nodes" / f"node_{node}.json"


def node_to_json(node: NodeSpec) -> dict[str, Any]:
    """The JSON form, for the file and for the plan's digest."""
    return {"format": FORMAT, "version": VERSION, **asdict(node)}


def write_node(folder: Path, node: NodeSpec) -> None:
    """Write a node's file below ``folder``."""
    write_json(node_path(folder, node.node), node_to_json(node))


def read_node(folder: Path, name: str) -> NodeSpec:
    """Read a node's file by the node's name; ``StageFormatError`` says what is wrong with it."""
    number = name.removeprefix("node_")
    if not name.startswith("node_") or not number.isdecimal():
        raise StageFormatError(f"{name!r} is not the name of a node; names look like 'node_0'")
    path = node_path(folder, int(number))
    if not path.exists():
        known = sorted(p.stem for p in path.parent.glob("node_*.json"))
        found = f"there are {', '.join(known)}" if known else "run clusterize() first"
        raise StageFormatError(f"{path} does not exist: {found}")
    data = read_json(path, _LIMIT)
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise StageFormatError(f"{path} is not a node file of this version of Ravnest")
    try:
        node = _from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise StageFormatError(f"{path} is malformed: {error}") from error
    if node.name != f"node_{int(number)}":
        raise StageFormatError(f"{path} is the file of {node.name}; it was copied to the wrong place")
    return node


def read_nodes(folder: Path) -> list[NodeSpec]:
    """Read all node files below ``folder``, by number; ``StageFormatError`` if there are none."""
    names = [path.stem for path in (folder / "nodes").glob("node_*.json")]
    numbers = sorted(int(name[5:]) for name in names if name[5:].isdecimal())
    if not numbers:
        raise StageFormatError(
            f"{folder} holds no nodes: run clusterize() first, or name the folder that it wrote"
        )
    return [read_node(folder, f"node_{number}") for number in numbers]


def _from_json(data: dict[str, Any]) -> NodeSpec:
    fields = {key: value for key, value in data.items() if key not in ("format", "version")}
    fields["role"] = Role(fields["role"])
    for side in ("previous", "next"):
        fields[side] = None if fields[side] is None else NeighbourSpec(**fields[side])
    fields["pipeline"] = tuple(fields["pipeline"])
    fields["roots"] = tuple(NeighbourSpec(**root) for root in fields["roots"])
    fields["rings"] = tuple(
        RingSpec(
            ring["id"],
            tuple(ring["names"]),
            tuple(NeighbourSpec(**member) for member in ring["members"]),
        )
        for ring in fields["rings"]
    )
    fields["certificates"] = CertificateFiles(**fields["certificates"])
    for name in (fields["bundle"], *asdict(fields["certificates"]).values()):
        inside(name)
    return NodeSpec(**fields)


def bundle_path(stage: StagePlan) -> str:
    """Where a node finds its stage, below node_data."""
    return f"cluster_{stage.cluster}/node_{stage.node.id}"


def node_file(plan: Plan, stage: StagePlan, bundle: str, sha256: str) -> NodeSpec:
    """A node's place in the plan; ``bundle`` is its stage's folder, ``sha256`` the stage's digest.

    The digest of the plan is left empty: it is made of all nodes' files.
    """
    node = stage.node.id
    cluster = plan.clusters[stage.cluster]
    return NodeSpec(
        plan="",
        node=node,
        cluster=stage.cluster,
        stage=stage.index,
        stages=len(cluster.stages),
        pipeline=tuple(each.node.id for each in cluster.stages),
        role=stage.role,
        address=str(stage.node.address),
        previous=_neighbour(plan.previous(node)),
        next=_neighbour(plan.next(node)),
        roots=tuple(
            NeighbourSpec(each.stages[0].node.id, str(each.stages[0].node.address))
            for each in plan.clusters
        ),
        rings=tuple(
            RingSpec(
                ring.id,
                ring.names,
                tuple(NeighbourSpec(m.node_id, str(m.address)) for m in ring.members),
            )
            for ring in plan.rings_of(node)
        ),
        bundle=bundle,
        sha256=sha256,
        seed=plan.seed,
        in_flight=cluster.stages[0].in_flight,
        in_flight_limit=cluster.in_flight_limit(plan.update_frequency),
        update_frequency=plan.update_frequency,
        certificates=CertificateFiles(
            "certificates/authority.pem",
            f"certificates/node_{node}.pem",
            f"certificates/node_{node}.key",
        ),
    )


def plan_digest(nodes: Sequence[NodeSpec], job: str = "") -> str:
    """Names the whole plan: who does what, with which stage, and for which job of a server.

    Two jobs can have the same plan otherwise, and their nodes must not take each other for peers.
    """
    canonical = job + json.dumps([node_to_json(node) for node in nodes], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _neighbour(stage: StagePlan | None) -> NeighbourSpec | None:
    return None if stage is None else NeighbourSpec(stage.node.id, str(stage.node.address))
