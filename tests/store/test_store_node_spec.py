"""A node's file reads back as it was written, and a damaged one is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ravnest.errors import StageFormatError
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
    next=None,
    roots=(NeighbourSpec(0, "b:1"), NeighbourSpec(2, "10.0.0.2:8082")),
    rings=(
        RingSpec(0, ("a.weight", "a.bias"), (NeighbourSpec(4, "[::1]:8084"), NeighbourSpec(0, "b:1"))),
    ),
    bundle="cluster_1/node_4",
    sha256="ab" * 32,
    seed=42,
    in_flight=3,
    in_flight_limit=9,
    update_frequency=2,
    certificates=CertificateFiles("c/authority.pem", "c/node_4.pem", "c/node_4.key"),
)


def test_round_trip(tmp_path: Path) -> None:
    write_node(tmp_path, NODE)
    assert read_node(tmp_path, "node_4") == NODE
    assert NODE.name == "node_4"
    text = (tmp_path / "nodes" / "node_4.json").read_text()
    assert not [line for line in text.splitlines() if line != line.rstrip()], "spaces end a line"


@pytest.mark.parametrize("name", ["", "4", "node_", "node_x", "node_-1", "node_1/../../x", "Node_4"])
def test_a_name_that_is_no_nodes(tmp_path: Path, name: str) -> None:
    with pytest.raises(StageFormatError, match="names look like 'node_0'"):
        read_node(tmp_path, name)


def test_a_missing_node_is_told_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(StageFormatError, match=r"run clusterize\(\) first"):
        read_node(tmp_path, "node_7")
    write_node(tmp_path, NODE)
    with pytest.raises(StageFormatError, match=r"node_7\.json does not exist: there are node_4"):
        read_node(tmp_path, "node_7")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda d: d.update(format="x"), "not a node file"),
    "later version": (lambda d: d.update(version=2), "not a node file"),
    "missing field": (lambda d: d.pop("seed"), "malformed"),
    "unknown field": (lambda d: d.update(run="rm"), "malformed"),
    "unknown role": (lambda d: d.update(role="Admin"), "malformed"),
    "role is a list": (lambda d: d.update(role=[]), "malformed"),
    "neighbour without address": (lambda d: d["previous"].pop("address"), "malformed"),
    "neighbour is text": (lambda d: d.update(next="x"), "malformed"),
    "roots is a number": (lambda d: d.update(roots=5), "malformed"),
    "root without address": (lambda d: d["roots"][1].pop("address"), "malformed"),
    "rings is a number": (lambda d: d.update(rings=5), "malformed"),
    "ring is text": (lambda d: d.update(rings=["x"]), "malformed"),
    "ring without members": (lambda d: d["rings"][0].pop("members"), "malformed"),
    "certificates is null": (lambda d: d.update(certificates=None), "malformed"),
    "bundle outside": (lambda d: d.update(bundle="../../other"), "leads out of its folder"),
    "bundle from the root": (lambda d: d.update(bundle="/etc"), "leads out of its folder"),
    "bundle is a number": (lambda d: d.update(bundle=5), "malformed"),
    "key outside": (lambda d: d["certificates"].update(key="/root/.ssh/id"), "leads out of its folder"),
    "another node's": (lambda d: d.update(node=5), "is the file of node_5"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_refused(tmp_path: Path, change: str) -> None:
    write_node(tmp_path, NODE)
    path = node_path(tmp_path, 4)
    data = json.loads(path.read_bytes())
    CHANGES[change][0](data)
    path.write_text(json.dumps(data))
    with pytest.raises(StageFormatError, match=CHANGES[change][1]) as caught:
        read_node(tmp_path, "node_4")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "null", '{"format": NaN}', "[" * 10_000])
def test_a_file_that_is_something_else(tmp_path: Path, content: str) -> None:
    node_path(tmp_path, 4).parent.mkdir()
    node_path(tmp_path, 4).write_text(content)
    with pytest.raises(StageFormatError, match=r"node_4\.json"):
        read_node(tmp_path, "node_4")
