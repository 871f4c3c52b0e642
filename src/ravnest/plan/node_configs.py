"""The pool of nodes, read from ``node_data/node_configs.json``.

The file is JSON with ``//`` comments and one entry per node; the keys are the node ids 0, 1, 2, ...
All mistakes of a file are reported at once, each with its path in the file.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravnest.errors import NodeConfigError
from ravnest.types import Address

EXAMPLE = """{
    "0": {"IP": "192.168.0.10:8080", "benchmarks": {"ram": 8, "bandwidth": 20}},
    "1": {"IP": "192.168.0.11:8080", "benchmarks": {"ram": 16, "bandwidth": 100}}
}"""

_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*')
_STRING_OR_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')
_NODE_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_MISSING = object()


@dataclass(frozen=True)
class NodeConfig:
    """One provider's machine, as its entry in the file describes it."""

    id: int
    address: Address
    ram: float
    """GB (1e9 bytes) for training: main memory, or the memory of the GPU."""
    bandwidth: float
    """Mbps in each direction."""
    compute: float | None = None
    """GFLOP/s while training; None if the file does not state it."""


def read_node_configs(path: str | Path) -> tuple[NodeConfig, ...]:
    """Read the nodes of a file, by ascending id; ``NodeConfigError`` names every mistake."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise NodeConfigError(
            f"{path} does not exist. Create it with one entry per node (ram in GB, bandwidth in"
            f" Mbps), for example:\n{EXAMPLE}"
        ) from None
    except UnicodeDecodeError as error:
        raise NodeConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise NodeConfigError(f"{path} cannot be read: {error.strerror}") from None
    return parse_node_configs(text, str(path))


def parse_node_configs(text: str, source: str) -> tuple[NodeConfig, ...]:
    """Read the nodes from the text of a file; ``source`` names the file in errors."""
    root = _load(text, source)
    if not isinstance(root, _Object):
        raise NodeConfigError(
            f"{source} must be an object with one entry per node, is {_shown(root)}; for example:"
            f"\n{EXAMPLE}"
        )
    if not root:
        raise NodeConfigError(f"{source} has no nodes; write one entry per node:\n{EXAMPLE}")
    nodes: list[NodeConfig] = []
    problems = list(_id_problems(root))
    for key, entry in root.items():
        problems += _entry_problems(f'"{key}"', entry)
        if not problems:
            nodes.append(_node(int(key), entry))
    problems += _shared_addresses(root)
    if problems:
        raise NodeConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return tuple(sorted(nodes, key=lambda node: node.id))


class _Object(dict[str, Any]):
    """JSON object that records which of its keys the text has more than once."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        result.repeated = tuple(key for key in result if keys.count(key) > 1)
    return result


def _load(text: str, source: str) -> object:
    text = _STRING_OR_COMMENT.sub(_blank_unless_string, text)
    text = _STRING_OR_LAST_COMMA.sub(_blank_unless_string, text)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise NodeConfigError(
            f"{source} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except (RecursionError, ValueError) as error:
        raise NodeConfigError(f"{source} is not valid JSON: {error}") from None


def _blank_unless_string(match: re.Match[str]) -> str:
    """Replace a comment by spaces, so that line and column in errors stay correct."""
    found = match.group()
    return found if found.startswith('"') else " " * len(found)


def _id_problems(root: _Object) -> Iterator[str]:
    yield from _repeats("", root)
    wrong = [key for key in root if not _NODE_ID.fullmatch(key)]
    for key in wrong:
        yield f'"{key}" is not a node id; the ids are the whole numbers "0", "1", "2", ...'
    if not wrong:
        missing = sorted(set(range(len(root))) - {int(key) for key in root})
        if missing:
            numbers = ", ".join(f'"{number}"' for number in missing)
            plural = "is" if len(missing) == 1 else "are"
            yield (
                f'the ids of {len(root)} nodes must be "0" to "{len(root) - 1}" without a gap;'
                f" {numbers} {plural} missing"
            )


def _entry_problems(path: str, entry: object) -> Iterator[str]:
    if not isinstance(entry, _Object):
        yield f'{path} must be an object with "IP" and "benchmarks", is {_shown(entry)}'
        return
    yield from _repeats(path, entry)
    yield from _unknown(path, entry, ("IP", "benchmarks"))
    try:
        _address(entry.get("IP", _MISSING))
    except ValueError as error:
        yield f"{path}.IP {error}"
    benchmarks = entry.get("benchmarks", _MISSING)
    inner = f"{path}.benchmarks"
    if not isinstance(benchmarks, _Object):
        found = "missing" if benchmarks is _MISSING else _shown(benchmarks)
        yield f'{inner} must be an object with "ram" and "bandwidth", is {found}'
        return
    yield from _repeats(inner, benchmarks)
    yield from _unknown(inner, benchmarks, ("ram", "bandwidth", "compute"))
    for key in ("ram", "bandwidth", "compute"):
        if key != "compute" or key in benchmarks:
            try:
                _positive(benchmarks.get(key, _MISSING))
            except ValueError as error:
                yield f"{inner}.{key} {error}"


def _repeats(path: str, entry: _Object) -> Iterator[str]:
    for key in entry.repeated:
        name = f"{path}.{key}" if path else f'"{key}"'
        yield f"{name} is given more than once; keep one"


def _unknown(path: str, entry: Mapping[str, object], known: tuple[str, ...]) -> Iterator[str]:
    for key in entry:
        if key not in known:
            lowered = {name.lower(): name for name in known}
            near = difflib.get_close_matches(key.lower(), lowered, n=1)
            hint = f'; did you mean "{lowered[near[0]]}"?' if near else ""
            names = ", ".join(f'"{name}"' for name in known)
            yield f"{path}.{key} is not a known key ({names}){hint}"


def _shared_addresses(root: _Object) -> Iterator[str]:
    first: dict[Address, str] = {}
    for key, entry in root.items():
        try:
            address = _address(entry.get("IP", _MISSING) if isinstance(entry, _Object) else None)
        except ValueError:
            continue
        if address in first:
            yield (
                f'"{key}".IP is {address}, as is "{first[address]}".IP; each node needs its own address'
            )
        first.setdefault(address, key)


def _node(number: int, entry: Mapping[str, Any]) -> NodeConfig:
    benchmarks = entry["benchmarks"]
    return NodeConfig(
        id=number,
        address=_address(entry["IP"]),
        ram=_positive(benchmarks["ram"]),
        bandwidth=_positive(benchmarks["bandwidth"]),
        compute=_positive(benchmarks["compute"]) if "compute" in benchmarks else None,
    )


def _positive(value: object) -> float:
    """Return the number; the message of the ``ValueError`` continues after the value's path."""
    if value is _MISSING:
        raise ValueError("is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, is {_shown(value)}")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, is {_shown(number)}")
    if number <= 0:
        raise ValueError(f"must be greater than 0, is {value}")
    return number


def _address(value: object) -> Address:
    """Return the address; the message of the ``ValueError`` continues after the value's path."""
    if value is _MISSING:
        raise ValueError("is missing")
    if not isinstance(value, str):
        raise ValueError(f'must be a string "host:port", is {_shown(value)}')  # noqa: TRY004
    return Address.parse(value)


def _shown(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
