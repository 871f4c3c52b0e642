"""A node's spec reads back as it was written; a damaged or contradictory one is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ravnest.errors import StageFormatError
from ravnest.schemas.base import Schema
from ravnest.store.node_spec import (
    CertificateFiles,
    NeighbourSpec,
    NodeSpec,
    RingSpec,
    node_path,
    read_node,
    write_node,
)
from ravnest.types import Role

NODE = NodeSpec(
    plan="d1ge57",
    node=4,
    cluster=1,
    stage=1,
    stages=3,
    pipeline=(2, 4, 5),
    role=Role.STEM,
    address="[::1]:8084",
    previous=NeighbourSpec(2, "10.0.0.2:8082"),
    next=NeighbourSpec(5, "10.0.0.5:8085"),
    roots=(NeighbourSpec(0, "b:1"), NeighbourSpec(2, "10.0.0.2:8082")),
    rings=(
        RingSpec(0, ("a.weight", "a.bias"), (NeighbourSpec(0, "b:1"), NeighbourSpec(4, "[::1]:8084"))),
    ),
    bundle="cluster_1/node_4",
    sha256="ab" * 32,
    seed=42,
    schedule="sync",
    microbatch_rows=4,
    smallest_rows=2,
    split_reason="each batch of 32 is split into 8 micro-batches of 4",
    in_flight=3,
    update_frequency=2,
    certificates=CertificateFiles("c/authority.pem", "c/node_4.pem", "c/node_4.key"),
    microbatches=8,
    batch_size=32,
    largest_rows=8,
    tight=True,
    kept=2,
    defers=False,
)


class Message(Schema):
    """A message of the HTTP API with a node spec."""

    node_spec: NodeSpec


def test_round_trip(tmp_path: Path) -> None:
    write_node(tmp_path, NODE)
    assert read_node(tmp_path, "node_4") == NODE
    assert NODE.name == "node_4"
    text = (tmp_path / "nodes" / "node_4.json").read_text()
    assert not [line for line in text.splitlines() if line != line.rstrip()], "spaces end a line"


def test_round_trip_over_http() -> None:
    text = Message(node_spec=NODE).model_dump_json()
    assert Message.model_validate_json(text).node_spec == NODE


@pytest.mark.parametrize("name", ["", "4", "node_", "node_x", "node_-1", "node_1/../../x", "Node_4"])
def test_an_invalid_node_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StageFormatError, match="names look like 'node_0'"):
        read_node(tmp_path, name)


def test_the_error_for_a_missing_node_lists_the_others(tmp_path: Path) -> None:
    with pytest.raises(StageFormatError, match=r"run clusterize\(\) first"):
        read_node(tmp_path, "node_7")
    write_node(tmp_path, NODE)
    with pytest.raises(StageFormatError, match=r"node_7\.json does not exist: there are node_4"):
        read_node(tmp_path, "node_7")


Change = Callable[[dict[str, Any]], object]

FILE_CHANGES: dict[str, tuple[Change, str]] = {
    "another format": (lambda d: d.update(format="x"), "not a node file"),
    "later version": (lambda d: d.update(version=3), "not a node file"),
    "another node's": (
        lambda d: (d.update(node=5, pipeline=[2, 5, 6]), d["next"].update(node=6), d.update(rings=[])),
        "is the file of node_5",
    ),
}
MALFORMED: dict[str, tuple[Change, str]] = {
    "missing field": (lambda d: d.pop("seed"), "seed"),
    "unknown field": (lambda d: d.update(run="rm"), "run"),
    "unknown nested field": (lambda d: d["roots"][1].update(run="rm"), "run"),
    "unknown role": (lambda d: d.update(role="Admin"), "role"),
    "role is a list": (lambda d: d.update(role=[]), "role"),
    "role of another position": (lambda d: d.update(role="Leaf"), "role"),
    "stage out of range": (lambda d: d.update(stage=3), "stage 3"),
    "negative stage": (lambda d: d.update(stage=-1), "stage -1"),
    "no stages": (lambda d: d.update(stages=0, stage=0), "stage 0"),
    "pipeline too short": (lambda d: d.update(pipeline=[2, 4]), "pipeline"),
    "pipeline with a node twice": (lambda d: d.update(pipeline=[2, 4, 2]), "pipeline"),
    "pipeline without the node": (lambda d: d.update(pipeline=[2, 6, 5]), "pipeline"),
    "negative node": (lambda d: d.update(pipeline=[2, 4, -5]), "negative"),
    "cluster without a root": (lambda d: d.update(cluster=2), "roots"),
    "negative cluster": (lambda d: d.update(cluster=-1), "cluster -1"),
    "another root": (lambda d: d["roots"][1].update(node=3), "roots"),
    "no previous node": (lambda d: d.update(previous=None), "previous"),
    "another next node": (lambda d: d["next"].update(node=7), "next"),
    "address without a port": (lambda d: d.update(address="10.0.0.1"), "address"),
    "next address is text": (lambda d: d["next"].update(address="no port"), r"next\.address"),
    "root's port too large": (lambda d: d["roots"][0].update(address="b:70000"), r"roots\[0\]"),
    "ring address": (lambda d: d["rings"][0]["members"][0].update(address="/"), "ring 0, node 0"),
    "neighbour without address": (lambda d: d["previous"].pop("address"), "address"),
    "neighbour is text": (lambda d: d.update(next="x"), "next"),
    "roots is a number": (lambda d: d.update(roots=5), "roots"),
    "root without address": (lambda d: d["roots"][1].pop("address"), "address"),
    "rings is a number": (lambda d: d.update(rings=5), "rings"),
    "ring is text": (lambda d: d.update(rings=["x"]), "rings"),
    "ring without members": (lambda d: d["rings"][0].pop("members"), "members"),
    "ring without this node": (lambda d: d["rings"][0]["members"].reverse(), "ring 0"),
    "no update": (lambda d: d.update(update_frequency=0), "update_frequency"),
    "nothing in flight": (lambda d: d.update(in_flight=0), "in_flight"),
    "no schedule": (lambda d: d.update(schedule="later"), "schedule"),
    "micro-batches of no rows": (lambda d: d.update(microbatch_rows=0), "microbatch_rows"),
    "no batch": (lambda d: d.update(batch_size=0), "batch_size"),
    "no largest rows": (lambda d: d.update(largest_rows=0), "largest_rows"),
    "nothing kept": (lambda d: d.update(kept=0), "kept must be 1 to in_flight, 3, is 0"),
    "more kept than in flight": (lambda d: d.update(kept=4), "kept must be 1 to in_flight, 3, is 4"),
    "no smallest rows": (lambda d: d.update(smallest_rows=0), "smallest_rows"),
    "an endless reason": (lambda d: d.update(split_reason="x" * 10**5), "split_reason"),
    "certificates is null": (lambda d: d.update(certificates=None), "certificates"),
    "bundle outside": (lambda d: d.update(bundle="../../other"), "leads out of its folder"),
    "bundle from the root": (lambda d: d.update(bundle="/etc"), "leads out of its folder"),
    "bundle is a number": (lambda d: d.update(bundle=5), "bundle"),
    "key outside": (lambda d: d["certificates"].update(key="/root/.ssh/id"), "leads out of its folder"),
}


@pytest.mark.parametrize("change", FILE_CHANGES | MALFORMED)
def test_a_changed_file_is_refused(tmp_path: Path, change: str) -> None:
    edit, says = (FILE_CHANGES | MALFORMED)[change]
    write_node(tmp_path, NODE)
    path = node_path(tmp_path, 4)
    data = json.loads(path.read_bytes())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(StageFormatError, match=says) as caught:
        read_node(tmp_path, "node_4")
    assert str(path) in str(caught.value)
    assert change in FILE_CHANGES or "is malformed" in str(caught.value)


@pytest.mark.parametrize("change", MALFORMED)
def test_a_changed_message_is_refused(change: str) -> None:
    edit, says = MALFORMED[change]
    data = json.loads(Message(node_spec=NODE).model_dump_json())
    edit(data["node_spec"])
    with pytest.raises(ValidationError, match=says):
        Message.model_validate_json(json.dumps(data))


@pytest.mark.parametrize("content", ["", "[]", "null", '{"format": NaN}', "[" * 10_000])
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, content: str) -> None:
    node_path(tmp_path, 4).parent.mkdir()
    node_path(tmp_path, 4).write_text(content)
    with pytest.raises(StageFormatError, match=r"node_4\.json"):
        read_node(tmp_path, "node_4")
