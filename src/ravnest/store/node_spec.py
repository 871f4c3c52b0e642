"""Description of one node, as its process reads it: ``node_data/nodes/node_<i>.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

from ravnest.deadlines import LINK_OUTAGE
from ravnest.errors import StageFormatError
from ravnest.plan.plan import Plan, StagePlan
from ravnest.relay.access import RelayAccess
from ravnest.relay.tickets import Endpoint
from ravnest.store.files import convert, has_format, inside, read_json, write_json
from ravnest.types import Address, Role, Schedule

FORMAT = "ravnest-node"
VERSION = 2
_LIMIT = 64 << 20
_LONGEST_OUTAGE = 86_400.0
_LONGEST_REASON = 4000
_LONGEST_SECRET = 256
_MOST_ADDRESSES = 16


@dataclass(frozen=True)
class NeighbourSpec:
    """Another node that this node talks to."""

    node: int
    address: str
    others: tuple[str, ...] = ()
    """Further addresses at which it may be reached: of other networks, or of IPv6."""

    @property
    def further(self) -> tuple[Address, ...]:
        """``others``, parsed."""
        return tuple(map(Address.parse, self.others))


@dataclass(frozen=True)
class RelaySpec:
    """Relays through which the nodes of a job reach each other if they cannot be dialled."""

    job: str
    """Name of the job at the relays."""
    ticket: str
    """Permission of this node to use them, signed by the server."""
    relays: tuple[tuple[str, ...], ...]
    """Addresses of each relay, the relay to prefer first."""


@dataclass(frozen=True)
class RingSpec:
    """A ring that this node is a member of."""

    id: int
    names: tuple[str, ...]
    """Names of the tensors, in model order."""
    members: tuple[NeighbourSpec, ...]
    """One member of each cluster, in the order of the clusters."""


@dataclass(frozen=True)
class CertificateFiles:
    """Paths of a node's TLS files, relative to node_data."""

    authority: str
    certificate: str
    key: str


@dataclass(frozen=True)
class NodeSpec:
    """One node's position in the plan, its neighbours and its settings.

    The same type is stored on disk and sent over HTTP. Construction checks that the fields agree with
    each other, because a spec can come from a server or a file that is not trusted.
    """

    plan: str
    """Digest of the whole plan; nodes of different plans reject each other."""
    node: int
    cluster: int
    stage: int
    """Position in the pipeline; the Root is 0."""
    stages: int
    pipeline: tuple[int, ...]
    """Nodes of the cluster, Root first."""
    role: Role
    address: str
    previous: NeighbourSpec | None
    next: NeighbourSpec | None
    roots: tuple[NeighbourSpec, ...]
    """Root of each cluster, in the order of the clusters."""
    rings: tuple[RingSpec, ...]
    bundle: str
    """Folder of the stage, relative to node_data."""
    sha256: str
    """Digest of the bundle's ``stage.json``."""
    seed: int
    schedule: Schedule
    """Schedule that the plan has chosen, for ``schedule="auto"``."""
    microbatch_rows: int | None
    """Samples in a micro-batch; None: batches are never split."""
    smallest_rows: int
    """Samples that a micro-batch must have."""
    split_reason: str
    """Why batches are split like this, or not split."""
    in_flight: int
    """Most micro-batches in flight that fit the memory of the cluster's nodes."""
    update_frequency: int
    """Batches per update."""
    certificates: CertificateFiles
    microbatches: int = 1
    """Micro-batches in a batch of the planned size."""
    loss_chunks: int = 1
    """Chunks of positions in which the last stage computes logits and loss; 1: as a whole."""
    splittable: bool = True
    """True if a batch can be split without a change of the result, as far as the plan knows."""
    batch_size: int | None = None
    """Samples in the batch that the plan was made for."""
    largest_rows: int | None = None
    """Samples in a micro-batch at most, by the memory of the cluster's nodes; None: not known."""
    tight: bool = False
    """True if the planned memory is most of what the node has."""
    kept: int | None = None
    """Most micro-batches whose activations fit the memory of this node at once; the others are
    recomputed. None: all in flight."""
    defers: bool = True
    """Weight gradients may be computed after the gradients of the inputs are sent, by the memory of this
    node."""
    delay_fits: bool = False
    """Two whole batches and two versions of the weights fit the memory of the cluster's nodes."""
    outage: float = LINK_OUTAGE
    """Seconds for which a connection to another node may be down before the run ends."""
    others: tuple[str, ...] = ()
    """Further addresses at which this node may be reached."""
    relay: RelaySpec | None = None
    """None: nodes are reached at their own addresses only."""
    generation: int = 0
    """Number of machines that held this node before; the one with the highest number is the node."""
    dials_next: bool = True
    """False: the next node dials this one. Two neighbours must not dial each other, because a second
    connection looks like a neighbour that was started again."""
    dials_previous: bool = False
    """True: the previous node does not know the address of this one, which took a place."""
    samples: tuple[int, ...] = ()
    """Training samples of each cluster in an epoch, as planned, which bound the weights of clusters in
    averages; empty: not known."""
    secret: str = dataclass_field(default="", repr=False)
    """Secret of the job, which nodes prove to each other where they do not use TLS; empty: none."""

    def __post_init__(self) -> None:
        problem = next(_problems(self), None)
        if problem is not None:
            raise StageFormatError(problem)

    @property
    def name(self) -> str:
        """Name that ``Node(name=...)`` takes."""
        return f"node_{self.node}"

    @property
    def relay_access(self) -> RelayAccess | None:
        """Access of this node to relays, if it has any."""
        if self.relay is None:
            return None
        relays = tuple(tuple(map(Address.parse, each)) for each in self.relay.relays)
        return RelayAccess(relays, Endpoint(self.relay.job, self.node), self.relay.ticket)


def _problems(spec: NodeSpec) -> Iterator[str]:
    """Yield each contradiction between the fields of a node."""
    yield from _position_problems(spec)
    yield from _neighbour_problems(spec)
    yield from _place_problems(spec)
    counts = ("microbatches", "in_flight", "smallest_rows", "update_frequency", "loss_chunks")
    for name, least in (*((count, 1) for count in counts), ("seed", 0), ("generation", 0)):
        if getattr(spec, name) < least:
            yield f"{name} must be at least {least}, is {getattr(spec, name)}"
    for name in ("microbatch_rows", "batch_size", "largest_rows"):
        rows = getattr(spec, name)
        if rows is not None and rows < 1:
            yield f"{name} must be at least 1, is {rows}"
    if spec.kept is not None and not 1 <= spec.kept <= spec.in_flight:
        yield f"kept must be 1 to in_flight, {spec.in_flight}, is {spec.kept}"
    if spec.loss_chunks > 1 and spec.stage < spec.stages - 1:
        yield f"loss_chunks is {spec.loss_chunks}, but only the last stage computes the loss"
    if not 0 <= spec.outage <= _LONGEST_OUTAGE:
        yield f"outage must be 0 to {_LONGEST_OUTAGE:g} seconds, is {spec.outage}"
    yield from _length_problems(spec)
    for path in (spec.bundle, *asdict(spec.certificates).values()):
        inside(path)


def _length_problems(spec: NodeSpec) -> Iterator[str]:
    if spec.samples and len(spec.samples) != len(spec.roots):
        yield f"samples must list the {len(spec.roots)} clusters"
    for name, most in (("split_reason", _LONGEST_REASON), ("secret", _LONGEST_SECRET)):
        if len(getattr(spec, name)) > most:
            yield f"{name} has {len(getattr(spec, name))} characters"


def _position_problems(spec: NodeSpec) -> Iterator[str]:
    if not 0 <= spec.stage < spec.stages:
        yield f"stage {spec.stage} is not one of {spec.stages} stages"
    if spec.role != Role.at(spec.stage, spec.stages):
        yield f"role is {spec.role}; stage {spec.stage} of {spec.stages} has another role"
    if len(spec.pipeline) != spec.stages or len(set(spec.pipeline)) != spec.stages:
        yield f"pipeline must list the {spec.stages} different nodes of the cluster"
    if spec.pipeline[spec.stage] != spec.node:
        yield f"node {spec.node} is not at position {spec.stage} of pipeline {list(spec.pipeline)}"
    if min(spec.pipeline) < 0:
        yield f"pipeline {list(spec.pipeline)} has a negative node number"
    if not 0 <= spec.cluster < len(spec.roots):
        yield f"cluster {spec.cluster} has no entry in roots, which lists {len(spec.roots)}"
    if spec.roots[spec.cluster].node != spec.pipeline[0]:
        yield f"roots[{spec.cluster}] is not the first node of the pipeline"


def _neighbour_problems(spec: NodeSpec) -> Iterator[str]:
    neighbours = {"previous": (spec.previous, spec.stage - 1), "next": (spec.next, spec.stage + 1)}
    for field, (neighbour, position) in neighbours.items():
        expected = spec.pipeline[position] if 0 <= position < spec.stages else None
        found = None if neighbour is None else neighbour.node
        if found != expected:
            yield f"{field} is node {found}; the pipeline has {expected} there"
    for ring in spec.rings:
        members = [member.node for member in ring.members]
        if len(members) != len(spec.roots) or members[spec.cluster] != spec.node:
            yield f"ring {ring.id} must have one member per cluster, with this node for its own"


def _place_problems(spec: NodeSpec) -> Iterator[str]:
    """Yield each address that cannot be dialled."""
    yield from _address_problems("address", spec.address, *spec.others)
    for field, neighbour in (("previous", spec.previous), ("next", spec.next)):
        if neighbour is not None:
            yield from _neighbour_address_problems(f"{field}.address", neighbour)
    for cluster, root in enumerate(spec.roots):
        yield from _neighbour_address_problems(f"roots[{cluster}].address", root)
    for ring in spec.rings:
        for member in ring.members:
            yield from _neighbour_address_problems(
                f"ring {ring.id}, node {member.node}: address", member
            )
    for number, relay in enumerate(() if spec.relay is None else spec.relay.relays):
        yield from _address_problems(f"relay.relays[{number}]", *relay)


def _neighbour_address_problems(field: str, neighbour: NeighbourSpec) -> Iterator[str]:
    yield from _address_problems(field, neighbour.address, *neighbour.others)


def _address_problems(field: str, *addresses: str) -> Iterator[str]:
    if not 1 <= len(addresses) <= _MOST_ADDRESSES:
        yield f"{field} must be 1 to {_MOST_ADDRESSES} addresses, has {len(addresses)}"
    for address in addresses:
        try:
            Address.parse(address)
        except ValueError as error:
            yield f"{field} {error}"


# --- files ---------------------------------------------------------------------------------------


def node_path(folder: Path, node: int) -> Path:
    """Return the path of a node's file below ``folder``."""
    return folder / "nodes" / f"node_{node}.json"


def write_node(folder: Path, node: NodeSpec) -> None:
    """Write a node's file below ``folder``."""
    write_json(node_path(folder, node.node), _to_json(node))


def read_node(folder: Path, name: str) -> NodeSpec:
    """Read the file of the node with this name; ``StageFormatError`` says what is wrong with it."""
    number = name.removeprefix("node_")
    if not name.startswith("node_") or not number.isdecimal():
        raise StageFormatError(f"{name!r} is not the name of a node; names look like 'node_0'")
    path = node_path(folder, int(number))
    if not path.exists():
        known = sorted(p.stem for p in path.parent.glob("node_*.json"))
        found = f"there are {', '.join(known)}" if known else "run clusterize() first"
        raise StageFormatError(f"{path} does not exist: {found}")
    data = read_json(path, _LIMIT)
    if not has_format(data, FORMAT, VERSION):
        raise StageFormatError(f"{path} is not a node file of this version of Ravnest")
    node = convert(data, NodeSpec, path)
    unknown = _unknown_field(data, _to_json(node))
    if unknown is not None:
        raise StageFormatError(f"{path} is malformed: unknown field {unknown}")
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


def _to_json(node: NodeSpec) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, **asdict(node)}


def _unknown_field(data: object, known: object) -> str | None:
    """Return the first field of ``data`` that ``known`` lacks; msgspec does not report those."""
    match data, known:
        case dict(), dict():
            for key, value in data.items():
                below = "" if key not in known else _unknown_field(value, known[key])
                if below is not None:
                    return f"{key}.{below}".rstrip(".")
        case list(), tuple():
            return next(filter(None, map(_unknown_field, data, known)), None)
    return None


# --- from a plan ---------------------------------------------------------------------------------


def bundle_path(stage: StagePlan) -> str:
    """Return the folder of a node's stage, relative to node_data."""
    return f"cluster_{stage.cluster}/node_{stage.node.id}"


def make_node_spec(plan: Plan, stage: StagePlan, bundle: str, sha256: str) -> NodeSpec:
    """Describe a node of the plan; ``bundle`` is its stage's folder, ``sha256`` the stage's digest.

    The digest of the plan is left empty, because ``plan_digest`` needs the specs of all nodes.
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
        schedule=plan.schedule,
        microbatch_rows=cluster.microbatch_rows,
        smallest_rows=plan.smallest_rows,
        split_reason=cluster.split_reason,
        in_flight=cluster.in_flight,
        update_frequency=plan.update_frequency,
        certificates=CertificateFiles(
            "certificates/authority.pem",
            f"certificates/node_{node}.pem",
            f"certificates/node_{node}.key",
        ),
        microbatches=cluster.microbatches,
        loss_chunks=cluster.loss_chunks if plan.next(node) is None else 1,
        splittable=plan.splittable,
        batch_size=plan.batch_size,
        largest_rows=cluster.largest_rows,
        tight=stage.tight,
        kept=stage.kept,
        defers=stage.defers,
        delay_fits=cluster.delay_fits,
    )


def plan_digest(nodes: Sequence[NodeSpec], job: str = "") -> str:
    """Return a digest that identifies a plan: its nodes, their stages and the server's job.

    Two jobs can have the same plan otherwise, and their nodes must not accept each other as peers.
    """
    canonical = job + json.dumps([_to_json(node) for node in nodes], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _neighbour(stage: StagePlan | None) -> NeighbourSpec | None:
    return None if stage is None else NeighbourSpec(stage.node.id, str(stage.node.address))
