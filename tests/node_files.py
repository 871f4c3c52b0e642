"""Node specs for tests that need one and do not depend on its values."""

from __future__ import annotations

from typing import Any

from ravnest.store.node_spec import CertificateFiles, NeighbourSpec, NodeSpec
from ravnest.types import Role


def node_file(node: int, *, stage: int | None = None, stages: int = 2, **changes: Any) -> NodeSpec:
    """Return a valid spec whose neighbours have the numbers beside its own.

    The stage is the node's number unless it is given.
    """
    index = node if stage is None else stage
    pipeline = _pipeline(node, index, stages)
    cluster = changes.get("cluster", 0)
    fields: dict[str, Any] = {
        "plan": "plan",
        "cluster": cluster,
        "address": f"127.0.0.1:{8080 + node}",
        "pipeline": pipeline,
        "previous": _neighbour(pipeline[index - 1]) if index > 0 else None,
        "next": _neighbour(pipeline[index + 1]) if index < stages - 1 else None,
        "roots": (_neighbour(pipeline[0]),) * (cluster + 1),
        "rings": (),
        "bundle": "stage",
        "sha256": "",
        "seed": 0,
        "schedule": "sync",
        "microbatch_rows": None,
        "smallest_rows": 1,
        "split_reason": "",
        "in_flight": stages,
        "update_frequency": 1,
        "certificates": CertificateFiles("a", "b", "c"),
    }
    role = Role.at(index, stages)
    return NodeSpec(
        **(fields | {"node": node, "stage": index, "stages": stages, "role": role} | changes)
    )


def _pipeline(node: int, index: int, stages: int) -> tuple[int, ...]:
    others = (number for number in range(max(node - index, 0), node + stages + 1) if number != node)
    return tuple(node if position == index else next(others) for position in range(stages))


def _neighbour(node: int) -> NeighbourSpec:
    return NeighbourSpec(node, f"127.0.0.1:{8080 + node}")
