"""What a provider needs to know to take its place: ``node_data/nodes/node_<i>.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ravnest.errors import StageFormatError
from ravnest.store.files import inside, read_json, write_json
from ravnest.types import Role

FORMAT = "ravnest-node"
VERSION = 1
_LIMIT = 64 << 20


@dataclass(frozen=True)
class Neighbour:
    """A node that this one talks to."""

    node: int
    address: str


@dataclass(frozen=True)
class RingEntry:
    """A ring that this node is a member of."""

    id: int
    names: tuple[str, ...]
    members: tuple[Neighbour, ...]
    """One for each cluster, in the order of the clusters."""


@dataclass(frozen=True)
class CertificateFiles:
    """Paths below node_data."""

    authority: str
    certificate: str
    key: str


@dataclass(frozen=True)
class NodeFile:
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
    previous: Neighbour | None
    next: Neighbour | None
    roots: tuple[Neighbour, ...]
    """The Root of each cluster, in the order of the clusters."""
    rings: tuple[RingEntry, ...]
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


def node_to_json(node: NodeFile) -> dict[str, Any]:
    """The JSON form, for the file and for the plan's digest."""
    return {"format": FORMAT, "version": VERSION, **asdict(node)}


def write_node(folder: Path, node: NodeFile) -> None:
    """Write a node's file below ``folder``."""
    write_json(node_path(folder, node.node), node_to_json(node))


def read_node(folder: Path, name: str) -> NodeFile:
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


def read_nodes(folder: Path) -> list[NodeFile]:
    """Read all node files below ``folder``, by number; ``StageFormatError`` if there are none."""
    names = [path.stem for path in (folder / "nodes").glob("node_*.json")]
    numbers = sorted(int(name[5:]) for name in names if name[5:].isdecimal())
    if not numbers:
        raise StageFormatError(
            f"{folder} holds no nodes: run clusterize() first, or name the folder that it wrote"
        )
    return [read_node(folder, f"node_{number}") for number in numbers]


def _from_json(data: dict[str, Any]) -> NodeFile:
    fields = {key: value for key, value in data.items() if key not in ("format", "version")}
    fields["role"] = Role(fields["role"])
    for side in ("previous", "next"):
        fields[side] = None if fields[side] is None else Neighbour(**fields[side])
    fields["pipeline"] = tuple(fields["pipeline"])
    fields["roots"] = tuple(Neighbour(**root) for root in fields["roots"])
    fields["rings"] = tuple(
        RingEntry(
            ring["id"], tuple(ring["names"]), tuple(Neighbour(**member) for member in ring["members"])
        )
        for ring in fields["rings"]
    )
    fields["certificates"] = CertificateFiles(**fields["certificates"])
    for name in (fields["bundle"], *asdict(fields["certificates"]).values()):
        inside(name)
    return NodeFile(**fields)
