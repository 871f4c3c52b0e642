"""Imports in ``src/ravnest`` point downward only, and nothing there prints, pickles or evaluates.

Reads the source; imports none of it, so that the check takes no time.
"""

import ast
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "__main__"),
    ("__init__", "node", "trainer", "utils", "operations"),  # the documented import paths
    ("client",),
    ("server",),
    ("provider",),
    ("http",),
    ("jobs",),
    ("schemas",),
    ("runtime",),
    ("averaging",),
    ("formation", "sharding"),
    ("store",),
    ("plan",),
    ("split",),
    ("transport",),
    ("relay",),
    ("wire", "logs"),
    (
        "types",
        "errors",
        "deadlines",
        "seed",
        "telemetry",
        "tracing",
        "host",
        "version",
        "keywords",
        "lazy_names",
    ),
)
"""Top to bottom. A module imports from its own layer and from those below it."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def problems(source: Path) -> list[str]:
    """What is wrong with the package below ``source``, each with file, line and name."""
    found: list[str] = []
    for path in sorted((source / "ravnest").rglob("*.py")):
        tree = ast.parse(path.read_bytes(), str(path))
        where = path.relative_to(source)
        found += [f"{where}:{line} {what}" for line, what in _problems_of(where, tree, source)]
    return found


def _problems_of(where: Path, tree: ast.Module, source: Path) -> Iterator[tuple[int, str]]:
    own = _part(where.with_suffix("").parts[1:])
    if own not in RANK:
        yield 1, f"belongs to no layer: add {own!r} to LAYERS in {Path(__file__).name}"
        return
    for line, module in _imports(tree, where, source):
        top, *rest = module.split(".")
        if top in UNSAFE_MODULES:
            yield line, f"imports {module}: bytes from a stranger must not become code"
        elif top == "ravnest":
            target = _part(rest)
            if target not in RANK:
                yield line, f"imports {module}, which belongs to no layer"
            elif RANK[target] < RANK[own]:
                yield line, f"imports {module}: {own!r} is below {target!r}, imports point downward only"
    yield from _calls(tree)


def _calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "print":
                yield (
                    node.lineno,
                    "calls print(): use logging, or write to sys.stdout where output is due",
                )
            if node.func.id in UNSAFE_CALLS:
                yield node.lineno, f"calls {node.func.id}(): bytes from a stranger must not become code"


def _part(parts: list[str] | tuple[str, ...]) -> str:
    """The module or package directly below ``ravnest``."""
    return parts[0] if parts else "__init__"


def _imports(tree: ast.Module, where: Path, source: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module imported, those under ``TYPE_CHECKING`` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = (
                where.parent.parts[: len(where.parent.parts) + 1 - node.level] if node.level else ()
            )
            module = ".".join([*package, *([node.module] if node.module else [])])
            for name in node.names:
                inner = f"{module}.{name.name}"
                yield node.lineno, inner if _is_module(source, inner) else module


def _is_module(source: Path, name: str) -> bool:
    path = source.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_imports_point_downward_and_nothing_prints_or_unpickles() -> None:
    found = problems(SOURCE)
    assert not found, "\n" + "\n".join(found)


def test_all_of_the_package_was_looked_at() -> None:
    parts = {path.relative_to(SOURCE / "ravnest").parts[0] for path in SOURCE.rglob("*.py")}
    assert {"cli", "formation.py", "store", "plan", "split", "transport", "errors.py"} <= parts


def test_the_check_needs_no_torch() -> None:
    names = {name for _, name in _imports(ast.parse(Path(__file__).read_bytes()), Path("x.py"), SOURCE)}
    assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "pytest"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("cli/plan", "store/bundle", "split/graph", "errors", "formation"):
        path = tmp_path / "ravnest" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        (path.parent / "__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "names"),
    [
        ("split/graph.py", "import ravnest.store.bundle", ["ravnest.store.bundle", "downward"]),
        ("split/graph.py", "from ravnest.store import bundle", ["ravnest.store.bundle", "downward"]),
        (
            "split/graph.py",
            "from ravnest.store.bundle import load",
            ["ravnest.store.bundle", "downward"],
        ),
        ("split/graph.py", "from ravnest import cli", ["ravnest.cli", "downward"]),
        ("split/graph.py", "from ravnest import clusterize", ["imports ravnest:", "downward"]),
        ("split/graph.py", "from ..store import bundle", ["ravnest.store.bundle", "downward"]),
        ("split/graph.py", "from .. import formation", ["ravnest.formation", "downward"]),
        ("split/graph.py", "def late():\n    import ravnest.cli", ["ravnest.cli", ":2", "downward"]),
        ("store/bundle.py", "from ravnest.formation import clusterize", ["ravnest.formation"]),
        ("formation.py", "from ravnest.cli import plan", ["ravnest.cli.plan", "downward"]),
        ("errors.py", "from ravnest.split.graph import Ref", ["ravnest.split.graph", "downward"]),
        ("store/bundle.py", "import ravnest.helpers", ["ravnest.helpers", "no layer"]),
        ("helpers.py", "", ["belongs to no layer"]),
        ("store/bundle.py", "import pickle", ["imports pickle"]),
        ("store/bundle.py", "from pickle import loads", ["imports pickle"]),
        ("store/bundle.py", "import torch, dill", ["imports dill"]),
        ("cli/plan.py", "print('plan')", ["calls print()"]),
        ("split/graph.py", "eval('1')", ["calls eval()"]),
        ("split/graph.py", "exec('1')", ["calls exec()"]),
    ],
)
def test_a_violation_is_named_with_its_file(
    package: Path, file: str, line: str, names: list[str]
) -> None:
    (package / "ravnest" / file).write_text(line + "\n")
    (problem,) = problems(package)
    assert problem.startswith(f"ravnest/{file}:")
    assert all(name in problem for name in names), problem


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("cli/plan.py", "from ravnest.formation import clusterize"),
        ("cli/plan.py", "from ravnest.cli import app"),
        ("store/bundle.py", "from ravnest.split import graph"),
        ("store/bundle.py", "from . import files"),
        ("split/graph.py", "from ..errors import SplitError"),
        ("split/graph.py", "import torch\nmodel.eval()"),
    ],
)
def test_what_is_allowed_passes(package: Path, file: str, line: str) -> None:
    (package / "ravnest" / file).write_text(line + "\n")
    assert problems(package) == []


def test_every_layer_is_listed_once() -> None:
    names = list(itertools.chain.from_iterable(LAYERS))
    assert sorted(set(names)) == sorted(names)
