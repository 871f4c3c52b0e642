"""Node specs for tests."""

from __future__ import annotations

from typing import Any

from ravnest.store.node_spec import CertificateFiles, NodeSpec
from ravnest.types import Role


def node_file(node: int, *, stage: int | None = None, stages: int = 2, **changes: Any) -> NodeSpec:
    """Return the spec of a node without neighbours; its stage is its number unless given."""
    index = node if stage is None else stage
    fields: dict[str, Any] = {
        "plan": "plan",
        "cluster": 0,
        "address": f"127.0.0.1:{8080 + node}",
        "previous": None,
        "next": None,
        "pipeline": (),
        "roots": (),
        "rings": (),
        "bundle": "stage",
        "sha256": "",
        "seed": 0,
        "in_flight": stages,
        "in_flight_limit": 3 * stages,
        "update_frequency": 1,
        "certificates": CertificateFiles("a", "b", "c"),
    }
    role = Role.at(index, stages)
    return NodeSpec(
        **(fields | {"node": node, "stage": index, "stages": stages, "role": role} | changes)
    )
