"""``node_configs.json`` is read with its comments, and every mistake is named by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ravnest.errors import NodeConfigError
from ravnest.plan.node_configs import EXAMPLE, NodeConfig, parse_node_configs, read_node_configs
from ravnest.types import Address

DOCUMENTED_EXAMPLE = """{
    "0":{
        "IP":"host-a:8080",
        "benchmarks":{
            "ram":8,
            "bandwidth":20
        }
    },
    "1":{
        "IP":"10.0.0.2:8080",
        "benchmarks":{
            "ram":16,
            "bandwidth":10, // Mbps
            "compute": 120.5
        }
    }
    // Add as many nodes as you need here
}
"""


def entry(**changes: Any) -> dict[str, Any]:
    benchmarks = {"ram": 8, "bandwidth": 20} | changes.pop("benchmarks", {})
    return {"IP": "10.0.0.1:8080", "benchmarks": benchmarks} | changes


def message(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(NodeConfigError) as caught:
        parse_node_configs(text, "node_data/node_configs.json")
    return str(caught.value)


def test_reads_the_documented_example_with_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "node_configs.json"
    path.write_text("\ufeff" + DOCUMENTED_EXAMPLE, encoding="utf-8")
    assert read_node_configs(path) == (
        NodeConfig(0, Address("host-a", 8080), 8.0, 20.0, None),
        NodeConfig(1, Address("10.0.0.2", 8080), 16.0, 10.0, 120.5),
    )


def test_the_example_in_the_error_is_valid() -> None:
    assert [node.id for node in parse_node_configs(EXAMPLE, "example")] == [0, 1]


def test_trailing_commas_are_allowed() -> None:
    text = '{"0": {"IP": "h:1", "benchmarks": {"ram": 1, "bandwidth": 1,},}, // last\n}'
    assert len(parse_node_configs(text, "pool")) == 1


def test_slashes_and_commas_inside_strings_are_kept() -> None:
    text = json.dumps({"0": entry(IP="http://h,}:1")})
    assert '"0".IP must be "host:port" with a host name or an IP, is "http://h,}:1"' in message(text)


def test_nodes_are_sorted_by_id() -> None:
    text = json.dumps({"1": entry(IP="b:1"), "0": entry(IP="a:1")})
    assert [node.id for node in parse_node_configs(text, "pool")] == [0, 1]


def test_ipv6_in_brackets() -> None:
    (node,) = parse_node_configs(json.dumps({"0": entry(IP="[::1]:8080")}), "pool")
    assert node.address == Address("::1", 8080)
    assert str(node.address) == "[::1]:8080"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"benchmarks": {"ram": -4}}, ".benchmarks.ram must be greater than 0, is -4"),
        ({"benchmarks": {"ram": 0}}, ".benchmarks.ram must be greater than 0, is 0"),
        ({"benchmarks": {"ram": float("nan")}}, ".benchmarks.ram must be a finite number, is NaN"),
        ({"benchmarks": {"ram": True}}, ".benchmarks.ram must be a number, is true"),
        ({"benchmarks": {"ram": "8"}}, '.benchmarks.ram must be a number, is "8"'),
        ({"benchmarks": {"ram": None}}, ".benchmarks.ram must be a number, is null"),
        ({"benchmarks": {"ram": 10**400}}, ".benchmarks.ram must be a finite number, is infinite"),
        ({"benchmarks": {"bandwidth": -1.5}}, ".benchmarks.bandwidth must be greater than 0, is -1.5"),
        ({"benchmarks": {"bandwidth": []}}, ".benchmarks.bandwidth must be a number, is []"),
        ({"benchmarks": {"compute": 0}}, ".benchmarks.compute must be greater than 0, is 0"),
        ({"benchmarks": {"compute": float("inf")}}, ".benchmarks.compute must be a finite number"),
        (
            {"benchmarks": {"bandwith": 3}},
            '.benchmarks.bandwith is not a known key ("ram", "bandwidth", "compute");'
            ' did you mean "bandwidth"?',
        ),
        ({"ip": "h:1"}, '.ip is not a known key ("IP", "benchmarks"); did you mean "IP"?'),
        ({"colour": 1}, '.colour is not a known key ("IP", "benchmarks")'),
        ({"IP": 8080}, '.IP must be a string "host:port", is 8080'),
        ({"IP": "<host>:<port>"}, '.IP must end in a port from 1 to 65535, is "<host>:<port>"'),
        ({"IP": "<host>:80"}, '.IP must be "host:port" with a host name or an IP, is "<host>:80"'),
        ({"IP": "localhost"}, '.IP must be "host:port", is "localhost"'),
        ({"IP": ":8080"}, '.IP must be "host:port", is ":8080"'),
        ({"IP": "h:0"}, '.IP must end in a port from 1 to 65535, is "h:0"'),
        ({"IP": "h:65536"}, '.IP must end in a port from 1 to 65535, is "h:65536"'),
        ({"IP": "h:８０"}, ".IP must end in a port from 1 to 65535"),
        ({"IP": "1.2.3.999:80"}, '.IP must be a valid IP address, is "1.2.3.999:80"'),
        ({"IP": "::1:80"}, '.IP must have an IPv6 host in brackets ("[::1]:8080"), is "::1:80"'),
        ({"IP": "[::x]:80"}, '.IP must be a valid IP address, is "[::x]:80"'),
        ({"benchmarks": {"ram": "8" * 99}}, ".benchmarks.ram must be a number, is"),
    ],
)
def test_a_malformed_entry_is_named_by_its_path(changes: dict[str, Any], expected: str) -> None:
    found = message({"0": entry(IP="a:1"), "1": entry(**({"IP": "b:1"} | changes))})
    assert f'node_data/node_configs.json: "1"{expected}' in found
    assert len(found.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"0": {"benchmarks": {"ram": 1, "bandwidth": 1}}}, '"0".IP is missing'),
        (
            {"0": {"IP": "h:1"}},
            '"0".benchmarks must be an object with "ram" and "bandwidth", is missing',
        ),
        ({"0": {"IP": "h:1", "benchmarks": 3}}, '"0".benchmarks must be an object with'),
        ({"0": {"IP": "h:1", "benchmarks": {"ram": 1}}}, '"0".benchmarks.bandwidth is missing'),
        ({"0": {"IP": "h:1", "benchmarks": {"bandwidth": 1}}}, '"0".benchmarks.ram is missing'),
        ({"0": "h:1"}, '"0" must be an object with "IP" and "benchmarks", is "h:1"'),
        ({"zero": entry()}, '"zero" is not a node id; the ids are the whole numbers "0", "1", "2", ...'),
        ({"-1": entry()}, '"-1" is not a node id'),
        ({"00": entry()}, '"00" is not a node id'),
        (
            {"0": entry(IP="a:1"), "2": entry(IP="b:1")},
            'the ids of 2 nodes must be "0" to "1" without a gap; "1" is missing',
        ),
        ({"1": entry()}, '"0" is missing'),
        (
            {"0": entry(), "1": entry()},
            '"1".IP is 10.0.0.1:8080, as is "0".IP; each node needs its own address',
        ),
        ({"0": entry(IP="Host:1"), "1": entry(IP="host:01")}, '"1".IP is host:1, as is "0".IP'),
        ('{"0": {}, "0": {}}', '"0" is given more than once; keep one'),
        ('{"0": {"IP": "h:1", "IP": "h:2"}}', '"0".IP is given more than once; keep one'),
        (
            '{"0": {"IP": "h:1", "benchmarks": {"ram": 1, "ram": 2, "bandwidth": 1}}}',
            '"0".benchmarks.ram is given more than once; keep one',
        ),
        ([], "must be an object with one entry per node, is []"),
        ({}, "has no nodes"),
        ('{\n  "0": }', "is not valid JSON: line 2, column 8: Expecting value"),
        ('// nothing\n{"0": {"IP": "h:1" "benchmarks": 1}}', "is not valid JSON: line 2, column 20"),
        ("", "is not valid JSON: line 1, column 1"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_malformed_file_is_explained(content: Any, expected: str) -> None:
    found = message(content)
    assert found.startswith("node_data/node_configs.json")
    assert expected in found


def test_all_mistakes_are_reported_at_once() -> None:
    found = message({"0": entry(benchmarks={"ram": -1}), "1": entry(benchmarks={"bandwidth": "fast"})})
    assert [line.removeprefix("node_data/node_configs.json: ") for line in found.splitlines()] == [
        '"0".benchmarks.ram must be greater than 0, is -1',
        '"1".benchmarks.bandwidth must be a number, is "fast"',
        '"1".IP is 10.0.0.1:8080, as is "0".IP; each node needs its own address',
    ]


def test_a_missing_file_says_what_to_create(tmp_path: Path) -> None:
    with pytest.raises(
        NodeConfigError, match=r"does not exist\. Create it with one entry per node"
    ) as caught:
        read_node_configs(tmp_path / "node_configs.json")
    assert EXAMPLE in str(caught.value)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "node_configs.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(NodeConfigError, match="is not UTF-8 text"):
        read_node_configs(path)
    with pytest.raises(NodeConfigError, match="cannot be read"):
        read_node_configs(tmp_path)
