"""From a plan to the files of its nodes: the same for ``clusterize`` and for the server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ravnest.plan.plan import Plan, StagePlan
from ravnest.store.nodefile import CertificateFiles, Neighbour, NodeFile, RingEntry, node_to_json


def bundle_path(stage: StagePlan) -> str:
    """Where a node finds its stage, below node_data."""
    return f"cluster_{stage.cluster}/node_{stage.node.id}"


def node_file(plan: Plan, stage: StagePlan, bundle: str, sha256: str) -> NodeFile:
    """A node's place in the plan; ``bundle`` is its stage's folder, ``sha256`` the stage's digest.

    The digest of the plan is left empty: it is made of all nodes' files.
    """
    node = stage.node.id
    cluster = plan.clusters[stage.cluster]
    return NodeFile(
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
            Neighbour(each.stages[0].node.id, str(each.stages[0].node.address)) for each in plan.clusters
        ),
        rings=tuple(
            RingEntry(
                ring.id, ring.names, tuple(Neighbour(m.node_id, str(m.address)) for m in ring.members)
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


def plan_digest(nodes: Sequence[NodeFile], job: str = "") -> str:
    """Names the whole plan: who does what, with which stage, and for which job of a server.

    Two jobs can have the same plan otherwise, and their nodes must not take each other for peers.
    """
    canonical = job + json.dumps([node_to_json(node) for node in nodes], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _neighbour(stage: StagePlan | None) -> Neighbour | None:
    return None if stage is None else Neighbour(stage.node.id, str(stage.node.address))
