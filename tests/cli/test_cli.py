"""The ``ravnest`` command without a server: output, written files and exit codes."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from node_files import node_file
from torch import nn
from typer.testing import CliRunner

from ravnest import __version__
from ravnest.cli.app import app, main
from ravnest.split import Split, StageModule, split
from ravnest.store.trained import save_trained

ROOT = Path(__file__).parents[2]

TARGETS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x, *, scale=None):
        y = self.last(torch.relu(self.second(torch.relu(self.first(x)))))
        return y if scale is None else y * scale

def args():
    return Small(), (torch.rand(8, 4),)

def tensor():
    return Small(), torch.rand(8, 4)

def keywords():
    return Small(), {"x": torch.rand(8, 4)}

def both():
    return Small(), (torch.rand(8, 4),), {"scale": torch.rand(8, 3)}

def model_only():
    return Small()

def nothing():
    return None

def number():
    return Small(), 5

def example_is_wrong():
    return Small(), {"y": torch.rand(8, 4)}

not_a_function = 5
"""

BROKEN = {
    "missing_import": "import os\nimport not_installed_anywhere\n",
    "nameless": "raise ModuleNotFoundError('run setup first')\n",
    "imports_broken": "import missing_import\n",
    "late": "def args():\n    import not_installed_anywhere\n",
    "typo": "def args():\n    return undefined\n",
}
"""Modules of a user that cannot be imported, or whose function fails."""


def entry(number: int, ram: float) -> dict[str, object]:
    return {"IP": f"127.0.0.1:{8080 + number}", "benchmarks": {"ram": ram, "bandwidth": 100}}


def configure(path: Path, count: int, ram: float = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({str(number): entry(number, ram) for number in range(count)}))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with ``targets.py`` and four nodes; imports are undone afterwards."""
    (tmp_path / "targets.py").write_text(TARGETS)
    for name, source in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import not_installed_either\n")
    configure(tmp_path / "node_data" / "node_configs.json", 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in ("targets", "package", *BROKEN):
        sys.modules.pop(name, None)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def ravnest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command as the shell runs it, in this process."""

    def run(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ravnest", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 0 if code is None else 1, *capsys.readouterr())

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"a folder"
        for path in folder.rglob("*")
    }


def is_one_error(ended: Ended) -> bool:
    """Exit code 1, nothing on stdout, and on stderr one message without a traceback."""
    return (
        ended.code == 1
        and ended.out == ""
        and ended.err.startswith("error: ")
        and "Traceback" not in ended.err
    )


def check_explained(text: str) -> None:
    """Check the facts in the explanation of a plan for the four nodes."""
    assert text.startswith("4 nodes in 2 clusters")
    for node in range(4):
        assert f"Node({node}) at 127.0.0.1:808{node} is the " in text
    assert text.count(" is the Root") >= 2
    assert len(re.findall(r"^ +Memory \S+ [kMG]B of 1 GB", text, re.M)) == 4
    assert text.count("bottleneck") == 2
    assert re.search(r"Ring 0: .*first\.weight", text)


def test_plan_as_json(project: Path, ravnest: Callable[..., Ended]) -> None:
    before = contents(project)
    ended = ravnest("plan", "targets:args", "--clusters", "2", "--json")
    assert ended.code == 0, ended.err
    plan = json.loads(ended.out)
    assert [cluster["id"] for cluster in plan["clusters"]] == [0, 1]
    stages = [stage for cluster in plan["clusters"] for stage in cluster["stages"]]
    assert sorted(stage["node"]["id"] for stage in stages) == [0, 1, 2, 3]
    assert {"Root", "Leaf"} <= {stage["role"] for stage in stages}
    assert all(stage["memory"]["weights"] > 0 for stage in stages)
    assert plan["rings"][0]["names"][0] == "first.weight"
    assert contents(project) == before


def test_plan_explains_and_writes_nothing(project: Path) -> None:
    before = contents(project)
    done = CliRunner().invoke(app, ["plan", "targets:args", "--clusters", "2"])
    assert done.exit_code == 0, done.output
    check_explained(done.stdout)
    assert contents(project) == before


def test_plan_as_a_process(project: Path) -> None:
    before = contents(project)
    script = "from ravnest.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", "targets:args", "--clusters", "2"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "40",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    check_explained(done.stdout)
    assert contents(project) == before


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ravnest", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("ravnest ")


def test_the_command_is_registered() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["scripts"] == {"ravnest": "ravnest.cli.app:main"}


@pytest.mark.parametrize("target", ["tensor", "keywords", "both"])
def test_example_inputs_are_accepted_in_any_form(
    project: Path, ravnest: Callable[..., Ended], target: str
) -> None:
    configure(project / "two.json", 2)
    ended = ravnest("plan", f"targets:{target}", "--nodes", "two.json")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("2 nodes in 1 cluster train about ")


@pytest.mark.usefixtures("project")
def test_plan_has_the_options_of_clusterize(ravnest: Callable[..., Ended]) -> None:
    ended = ravnest("plan", "targets:args", "--clusters", "4", "--pass-data", "--update-frequency", "2")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("4 nodes in 4 clusters train about ")
    assert ended.out.count("is the Root") == 4


REFUSED = {
    "no colon": (["plan", "targets"], "'targets' is not of the form module:function"),
    "no function": (["plan", "targets:"], "'targets:' is not of the form module:function"),
    "no module": (["plan", ":args"], "':args' is not of the form module:function"),
    "unknown module": (
        ["plan", "nowhere:args"],
        "there is no module 'nowhere' in .*: run the command in the folder",
    ),
    "unknown function": (["plan", "targets:nobody"], "the module targets has no function nobody"),
    "not a function": (["plan", "targets:not_a_function"], "has no function not_a_function"),
    "returns a model": (["plan", "targets:model_only"], r"must return \(model, args\).*got Small"),
    "returns nothing": (["plan", "targets:nothing"], r"must return \(model, args\).*got NoneType"),
    "returns a number": (
        ["plan", "targets:number"],
        "must return example inputs after the model, got int",
    ),
    "missing node configs": (
        ["plan", "targets:args", "--nodes", "none.json"],
        r"none\.json does not exist",
    ),
    "malformed node configs": (
        ["plan", "targets:args", "--nodes", "targets.py"],
        r"targets\.py is not valid JSON",
    ),
    "too many clusters": (["plan", "targets:args", "--clusters", "9"], "clusters=9 is not possible"),
    "too little RAM": (["plan", "targets:args", "--nodes", "tiny.json"], "the model needs .* offer"),
    "wrong example": (["plan", "targets:example_is_wrong"], "example inputs do not fit .*'x'"),
    "nothing to fuse": (["fuse"], "holds no trained stage of cluster 0"),
    "no such cluster": (["fuse", "--cluster", "3"], "holds no trained stage of cluster 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_one_message_and_exit_code_1(
    project: Path, ravnest: Callable[..., Ended], name: str
) -> None:
    configure(project / "tiny.json", 2, ram=1e-6)
    before = contents(project)
    args, says = REFUSED[name]
    ended = ravnest(*args)
    assert is_one_error(ended), ended
    assert re.search(says, ended.err.splitlines()[0]), ended.err
    assert contents(project) == before


@pytest.mark.parametrize(
    ("target", "cause", "line"),
    [
        (
            "missing_import:args",
            "ModuleNotFoundError: No module named 'not_installed_anywhere'",
            "missing_import.py:2: import not_installed_anywhere",
        ),
        (
            "imports_broken:args",
            "ModuleNotFoundError: No module named 'not_installed_anywhere'",
            "missing_import.py:2: import not_installed_anywhere",
        ),
        (
            "package.module:args",
            "ModuleNotFoundError: No module named 'not_installed_either'",
            "__init__.py:1: import not_installed_either",
        ),
        ("nameless:args", "ModuleNotFoundError: run setup first", "nameless.py:1: raise "),
        (
            "late:args",
            "ModuleNotFoundError: No module named 'not_installed_anywhere'",
            "late.py:2: import not_installed_anywhere",
        ),
        ("typo:args", "NameError: name 'undefined'", "typo.py:2: return undefined"),
    ],
)
def test_an_error_in_the_users_module_is_shown_with_its_line(
    project: Path, ravnest: Callable[..., Ended], target: str, cause: str, line: str
) -> None:
    ended = ravnest("plan", target)
    assert is_one_error(ended), ended
    first, second = ended.err.splitlines()
    assert first.startswith(f"error: {target} fails: {cause}")
    if "'not_installed_anywhere'" in cause:
        assert first.endswith(" -m pip install not_installed_anywhere")
    assert second.startswith(str(project))
    assert line in second


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "target", ["targets.more:args", "nowhere.else:args"], ids=["not a package", "no package"]
)
def test_a_missing_submodule_is_named(ravnest: Callable[..., Ended], target: str) -> None:
    ended = ravnest("plan", target)
    assert is_one_error(ended), ended
    assert f"there is no module '{target.partition(':')[0]}' in " in ended.err


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "args",
    [["plan"], ["plan", "targets:args", "--clusters", "0"], ["fuse", "--cluster", "-1"], ["unknown"]],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_2(ravnest: Callable[..., Ended], args: list[str]) -> None:
    ended = ravnest(*args)
    assert (ended.code, ended.out) == (2, "")
    assert "Usage:" in ended.err


@pytest.mark.usefixtures("project")
def test_brackets_in_a_message_are_shown(ravnest: Callable[..., Ended]) -> None:
    ended = ravnest("plan", "targets:args", "--nodes", "[bold]nodes[/].json")
    assert is_one_error(ended), ended
    assert ended.err.startswith("error: [bold]nodes[/].json does not exist")


def test_version_and_help(ravnest: Callable[..., Ended]) -> None:
    assert ravnest("--version") == (0, f"ravnest {__version__}\n", "")
    for args in ([], ["--help"]):
        shown = ravnest(*args)
        assert re.search(r"\bplan\b", shown.out + shown.err)
        assert re.search(r"\bfuse\b", shown.out + shown.err)


# --- fuse ----------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def stages() -> Split:
    torch.manual_seed(0)
    return split(Two(), torch.rand(4, 3), stages=2)


def save(folder: Path, stages: Split, cluster: int) -> None:
    for number, stage in enumerate(stages.stages):
        save_trained(
            folder, node_file(number, cluster=cluster), StageModule(stage.spec, stage.tensors), run="run"
        )


def test_fuse_writes_the_state_dict(project: Path, ravnest: Callable[..., Ended], stages: Split) -> None:
    save(project / "trained", stages, cluster=0)
    save(project / "copies", stages, cluster=3)
    assert ravnest("fuse") == (0, "wrote trained/trained_state_dict.pt\n", "")
    ended = ravnest("fuse", "--cluster", "3", "--folder", "copies")
    assert ended == (0, "wrote copies/trained_state_dict.pt\n", "")
    for folder in ("trained", "copies"):
        fused = torch.load(project / folder / "trained_state_dict.pt", weights_only=True)
        assert not any(Two().load_state_dict(fused, strict=True))


def test_fuse_names_the_missing_stage(
    project: Path, ravnest: Callable[..., Ended], stages: Split
) -> None:
    save(project / "trained", stages, cluster=0)
    (project / "trained" / "cluster_0" / "node_1.json").unlink()
    ended = ravnest("fuse")
    assert is_one_error(ended), ended
    assert "lacks stage 1 of 2: it has stage 0 (node_0)" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not (project / "trained" / "trained_state_dict.pt").exists()
