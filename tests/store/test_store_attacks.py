"""Hostile stages: each of these is refused with a clear error, and nothing of it runs.

An attacker controls both files and can make every digest inside them agree. Attacks on the weights
are therefore signed again, unless the attack is on the digest.
"""

import copy
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.errors import OperatorError, StageFormatError
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.limits import (
    MAX_ARGUMENTS,
    MAX_DIMENSIONS,
    MAX_OPERATIONS,
    MAX_STATE_TENSORS,
    MAX_SYMBOLS,
    MAX_TEXT,
    MAX_VALUES,
)
from ravnest.split.program import Program
from ravnest.store import bundle
from ravnest.store.bundle import STAGE_FILE, WEIGHTS_FILE, load_module
from ravnest.store.files import sha256_of

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a stage ran while it was loaded")

    monkeypatch.setattr(Program, "__call__", refuse)


def read(folder: Path) -> Json:
    return json.loads((folder / STAGE_FILE).read_bytes())  # type: ignore[no-any-return]


def write(folder: Path, data: object) -> None:
    (folder / STAGE_FILE).write_text(json.dumps(data))


def sign(folder: Path) -> None:
    """Make the stage's digest of the weights agree with the file."""
    data = read(folder)
    data["weights"]["sha256"] = sha256_of(folder / WEIGHTS_FILE)
    write(folder, data)


def test_the_original_stage_is_valid(last: Path) -> None:
    """Otherwise the attacks below would prove nothing."""
    data = read(last)
    write(last, data)
    sign(last)
    assert load_module(last, sha256_of(last / STAGE_FILE)).spec.index == 2
    assert data["graphs"]["train"]["structure"]["keys"] == ["logits", "hidden"]
    assert len(data["graphs"]["train"]["operations"]) >= 2
    assert state(data, "embed.weight")["stages"][0] == 0, "the last stage holds a replica"


# --- the graph -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """A change of ``stage.json``, and what the refusal says."""

    name: str
    change: Callable[[Json], object]
    says: str
    error: type[ValueError] = StageFormatError


def train(data: Json) -> Json:
    return data["graphs"]["train"]  # type: ignore[no-any-return]


def operation(data: Json, index: int = 0) -> Json:
    return train(data)["operations"][index]  # type: ignore[no-any-return]


def state(data: Json, key: str) -> Json:
    return next(entry for entry in data["state"] if entry["key"] == key)


def rename(data: Json, key: str) -> None:
    """Call the tied weight ``key``, wherever it is named."""
    entry = state(data, "embed.weight")
    entry["key"] = entry["names"][0] = key
    for graph in data["graphs"].values():
        graph["state"] = [[name, key if old == "embed.weight" else old] for name, old in graph["state"]]


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def structure(new: object) -> Callable[[Json], object]:
    return lambda data: train(data).update(structure=new)


def argument(new: object) -> Callable[[Json], object]:
    return lambda data: operation(data)["args"].append(new)


def use(target: str) -> Callable[[Json], object]:
    return lambda data: operation(data).update(target=target)


SIZE = {"name": "x", "dtype": "int64", "shape": [1], "gradient": False}

ATTACKS = [
    Attack("another format", lambda d: d.update(format="pickle"), "not a Ravnest stage"),
    Attack("no format", lambda d: d.pop("format"), "not a Ravnest stage"),
    Attack("later version", lambda d: d.update(version=2), "format version 2"),
    Attack("no version", lambda d: d.pop("version"), "format version None"),
    Attack("negative stage", lambda d: d.update(stage=-1), "stage -1 of 3"),
    Attack("stage beyond the last", lambda d: d.update(stage=3), "stage 3 of 3"),
    Attack(
        "stage is a flag", lambda d: d.update(stage=True), "Expected `int`, got `bool` - at `$.stage`"
    ),
    Attack(
        "stage is a fraction",
        lambda d: d.update(stage=2.0),
        "Expected `int`, got `float` - at `$.stage`",
    ),
    Attack("far too many stages", lambda d: d.update(stages=10**15), "does not exist"),
    Attack("unknown field", lambda d: d.update(comment="x"), "unknown field `comment`"),
    Attack("unknown field within", lambda d: operation(d).update(code="x"), "unknown field `code`"),
    Attack("field is not Unicode", lambda d: d.update({"\ud800": 1}), "not Unicode"),
    Attack("kind is not Unicode", lambda d: d["state"][0].update(kind="\ud800"), "not Unicode"),
    Attack("no graphs", lambda d: d.pop("graphs"), "missing required field `graphs`"),
    Attack("graphs in a list", lambda d: d.update(graphs=[]), "at `$.graphs`"),
    Attack("no graph for eval", lambda d: d["graphs"].pop("eval"), "missing required field `eval`"),
    Attack("graph is text", lambda d: d["graphs"].update(eval="x"), "at `$.graphs.eval`"),
    Attack("no weights", lambda d: d.pop("weights"), "missing required field `weights`"),
    Attack("weights elsewhere", lambda d: d["weights"].update(file="/etc/passwd"), "weights.file"),
    Attack("digest is null", lambda d: d["weights"].update(sha256=None), "weights.sha256"),
    Attack(
        "digest of other bytes", lambda d: d["weights"].update(sha256="0" * 64), "changed or damaged"
    ),
    Attack(
        "no versions", lambda d: d.pop("module_versions"), "missing required field `module_versions`"
    ),
    Attack("versions in a list", lambda d: d.update(module_versions=[]), "at `$.module_versions`"),
    Attack("version is text", lambda d: d.update(module_versions={"a": "1"}), "at `$.module_versions["),
    Attack(
        "version is a flag", lambda d: d.update(module_versions={"a": True}), "at `$.module_versions["
    ),
    Attack(
        "version is an object", lambda d: d.update(module_versions={"a": {}}), "at `$.module_versions["
    ),
    Attack("versions elsewhere", lambda d: d.update(module_versions={"a": 1}), "only the first stage"),
    # state
    Attack("state is no list", lambda d: d.update(state={}), "at `$.state`"),
    Attack("state entry is text", lambda d: d["state"].append("x"), "at `$.state["),
    Attack("state twice", lambda d: d["state"].append(d["state"][0]), "listed twice"),
    Attack(
        "two tensors of one name",
        lambda d: state(d, "embed.weight").update(names=["embed.weight", "scale"]),
        "listed twice",
    ),
    Attack("dunder", lambda d: rename(d, "__class__.x"), "not the name of a parameter"),
    Attack("dunder leaf", lambda d: rename(d, "x.__dict__"), "not the name of a parameter"),
    Attack("empty part", lambda d: rename(d, "a..b"), "not the name of a parameter"),
    Attack("parent folder", lambda d: rename(d, "../../x"), "not the name of a parameter"),
    Attack("empty name", lambda d: rename(d, ""), "not the name of a parameter"),
    Attack("control character", lambda d: rename(d, "a\x1b[2J"), "not the name of a parameter"),
    Attack("key is no text", lambda d: d["state"][0].update(key=5), "at `$.state[0].key`"),
    Attack("key is not its name", lambda d: d["state"][0].update(key="y"), "names of 'y'"),
    Attack("no names", lambda d: d["state"][0].update(names=[]), "are malformed"),
    Attack("place too few", lambda d: d["state"][0].update(positions=[]), "are malformed"),
    Attack("place below -1", lambda d: state(d, "scale").update(positions=[-2]), "Expected `int` >= -1"),
    Attack("unknown kind", lambda d: d["state"][0].update(kind="code"), "at `$.state[0].kind`"),
    Attack("kind is a list", lambda d: d["state"][0].update(kind=[]), "at `$.state[0].kind`"),
    Attack("unknown dtype", lambda d: d["state"][0].update(dtype="object"), "not a dtype"),
    Attack("dtype is a function", lambda d: d["state"][0].update(dtype="load"), "not a dtype"),
    Attack("other dtype", lambda d: state(d, "scale").update(dtype="int32"), "scale has shape"),
    Attack("wider dtype", lambda d: state(d, "embed.weight").update(dtype="float64"), "truncated"),
    Attack("other shape", lambda d: state(d, "embed.weight").update(shape=[6, 11]), "has shape"),
    Attack("more elements", lambda d: state(d, "embed.weight").update(shape=[12, 6]), "truncated"),
    Attack("huge shape", lambda d: state(d, "embed.weight").update(shape=[2**48] * 9), "truncated"),
    Attack("huge size", lambda d: state(d, "embed.weight").update(shape=[2**63]), "Expected `int` <= "),
    Attack(
        "negative size", lambda d: state(d, "embed.weight").update(shape=[-1]), "Expected `int` >= 0"
    ),
    Attack(
        "size is text",
        lambda d: state(d, "embed.weight").update(shape=["b0"]),
        "Expected `int`, got `str`",
    ),
    Attack("strides overlap", lambda d: state(d, "embed.weight").update(strides=[0, 0]), "the strides"),
    Attack("strides leap", lambda d: state(d, "embed.weight").update(strides=[2**40, 1]), "the strides"),
    Attack("strides too few", lambda d: state(d, "embed.weight").update(strides=[1]), "the strides"),
    Attack(
        "negative stride",
        lambda d: state(d, "embed.weight").update(strides=[-6, 1]),
        "Expected `int` >= 0",
    ),
    Attack("trainable is 1", lambda d: d["state"][0].update(trainable=1), "at `$.state[0].trainable`"),
    Attack("trainable buffer", lambda d: state(d, "scale").update(trainable=True), "cannot be trained"),
    Attack(
        "trainable integers",
        lambda d: state(d, "embed.weight").update(dtype="int32"),
        "cannot be trained",
    ),
    Attack("held by nobody", lambda d: d["state"][0].update(stages=[]), "stages that hold"),
    Attack("held elsewhere", lambda d: d["state"][0].update(stages=[0]), "stages that hold"),
    Attack("held twice", lambda d: d["state"][0].update(stages=[2, 2]), "stages that hold"),
    Attack("held by stage 7", lambda d: d["state"][0].update(stages=[2, 7]), "stages that hold"),
    Attack("held by stage -1", lambda d: d["state"][0].update(stages=[-1, 2]), "stages that hold"),
    Attack("tensor too few", lambda d: d["state"].remove(state(d, "scale")), "'scale' is not in"),
    Attack("use of unknown state", lambda d: train(d)["state"].append(["y", "z"]), "'z' is not in"),
    Attack("use is no pair", lambda d: train(d)["state"].append(["y"]), "of at least length 2"),
    # inputs and sizes
    Attack("inputs missing", lambda d: train(d).pop("inputs"), "missing required field `inputs`"),
    Attack("input is null", lambda d: train(d)["inputs"].append(None), "at `$.graphs.train.inputs["),
    Attack("input dtype", lambda d: train(d)["inputs"][0].update(dtype=7), "not the name of a dtype"),
    Attack("size of nothing", lambda d: train(d)["inputs"][0].update(shape=["0*b0"]), "not a size"),
    Attack("size of expression", lambda d: train(d)["inputs"][0].update(shape=["b0+1"]), "not a size"),
    Attack(
        "size of many digits",
        lambda d: train(d)["inputs"][0].update(shape=["9" * 5000 + "*b0"]),
        "not a size",
    ),
    Attack(
        "size is a float",
        lambda d: train(d)["inputs"][0].update(shape=[1.5]),
        "Expected `int | str`, got `float`",
    ),
    Attack(
        "gradient of integers",
        lambda d: train(d)["inputs"][0].update(dtype="int64", gradient=True),
        "no gradient can flow",
    ),
    Attack(
        "gradient of a number",
        lambda d: train(d)["inputs"][0].update(dtype=None, gradient=True),
        "no gradient can flow",
    ),
    Attack("symbol is text", lambda d: train(d)["symbols"].append("b9"), "at `$.graphs.train.symbols["),
    Attack("symbol twice", lambda d: train(d)["symbols"].append(train(d)["symbols"][0]), "listed twice"),
    Attack("empty bounds", lambda d: train(d)["symbols"][0].update(maximum=0), "leave no size"),
    Attack("signature missing", lambda d: d.pop("signature"), "missing required field `signature`"),
    Attack("signature twice", lambda d: d["signature"].append(d["signature"][0]), "signature"),
    Attack("signature too short", lambda d: d["signature"][0].update(values=[]), "signature"),
    # operations
    Attack(
        "operations missing", lambda d: train(d).pop("operations"), "missing required field `operations`"
    ),
    Attack(
        "operation is text",
        lambda d: train(d)["operations"].append("x"),
        "at `$.graphs.train.operations[",
    ),
    Attack("no target", lambda d: operation(d).pop("target"), "missing required field `target`"),
    Attack("target is a list", lambda d: operation(d).update(target=[]), "operations[0].target`"),
    Attack("name is code", lambda d: operation(d).update(name="a;import os"), "not an identifier"),
    Attack("name is empty", lambda d: operation(d).update(name=""), "not an identifier"),
    Attack("name has a dot", lambda d: operation(d).update(name="a.b"), "not an identifier"),
    Attack("name is null", lambda d: operation(d).update(name=None), "operations[0].name`"),
    Attack(
        "name twice",
        lambda d: train(d)["operations"].append(copy.deepcopy(operation(d))),
        "is used twice",
    ),
    Attack(
        "name of an input",
        lambda d: operation(d).update(name=train(d)["inputs"][0]["name"]),
        "is used twice",
    ),
    Attack(
        "reads itself", lambda d: argument({"value": operation(d)["name"]})(d), "not defined before it"
    ),
    Attack(
        "reads what comes later",
        lambda d: argument({"value": operation(d, -1)["name"]})(d),
        "not defined before it",
    ),
    Attack("reads nothing", argument({"value": "nobody"}), "not defined before it"),
    Attack("reads nothing, nested", argument([[{"value": "nobody"}]]), "not defined before it"),
    Attack(
        "keyword reads nothing",
        lambda d: operation(d).update(kwargs={"x": {"value": "nobody"}}),
        "not defined before it",
    ),
    Attack("kwargs in a list", lambda d: operation(d).update(kwargs=[]), "operations[0].kwargs`"),
    Attack("args in an object", lambda d: operation(d).update(args={}), "operations[0].args`"),
    Attack("no_grad is text", lambda d: operation(d).update(no_grad="yes"), "operations[0].no_grad`"),
    Attack("unknown argument", argument({"code": "x"}), "is not an argument"),
    Attack("argument of two", argument({"value": "x", "dtype": "int8"}), "is not an argument"),
    Attack("argument is empty", argument({}), "is not an argument"),
    Attack("value is a number", argument({"value": 1}), "is not an argument"),
    Attack("another device", argument({"device": "cuda:0"}), "is not an argument"),
    Attack("float is code", argument({"float": "1e5"}), "is not an argument"),
    Attack("dtype is a module", argument({"dtype": "os"}), "not a dtype"),
    Attack("layout is a function", argument({"layout": "load"}), "not a layout"),
    Attack("dtype as layout", argument({"layout": "float32"}), "not a layout"),
    Attack("integer of 65 bits", argument(2**63), "is not an argument"),
    Attack("deep argument", argument(nested(17)), "is not an argument"),
    Attack("very deep argument", argument(nested(500)), "is not an argument"),
    Attack("deep name", lambda d: operation(d).update(name=nested(500)), "operations[0].name`"),
    # outputs
    Attack(
        "output of nothing", lambda d: train(d)["outputs"][0].__setitem__(1, {"value": "n"}), "reads"
    ),
    Attack("output is text", lambda d: train(d)["outputs"].append("x"), "at `$.graphs.train.outputs["),
    Attack("output too many", lambda d: train(d)["outputs"].append(["x", 1]), "do not fill"),
    Attack("output too few", lambda d: train(d)["outputs"].pop(), "do not fill"),
    Attack("no structure", structure(None), "only the last stage"),
    Attack(
        "structure missing", lambda d: train(d).pop("structure"), "missing required field `structure`"
    ),
    Attack("structure is text", structure("os"), "structure is malformed"),
    Attack("unknown structure", structure({"object": ["*", "*"]}), "structure is malformed"),
    Attack("two structures", structure({"list": ["*", "*"], "tuple": []}), "structure is malformed"),
    Attack("children in text", structure({"list": "**"}), "structure is malformed"),
    Attack("keys of a list", structure({"list": ["*", "*"], "keys": [0]}), "structure is malformed"),
    Attack("keys too few", structure({"dict": ["*", "*"], "keys": ["a"]}), "structure is malformed"),
    Attack("keys alike", structure({"dict": ["*", "*"], "keys": ["a", "a"]}), "structure is malformed"),
    Attack("keys nested", structure({"dict": ["*", "*"], "keys": [[], []]}), "structure is malformed"),
    Attack(
        "constant is a list",
        structure({"tuple": ["*", "*", {"constant": []}]}),
        "structure is malformed",
    ),
    Attack("structure of 100 levels", structure({"list": [nested(100)]}), "structure is malformed"),
    *(
        Attack(
            f"namedtuple of {name} with {' and '.join(fields)}",
            structure({"namedtuple": ["*", "*"], "keys": fields, "name": name}),
            "structure is malformed",
        )
        for name, fields in [
            ("Out", ["_x", "y"]),
            ("Out", ["__class__", "y"]),
            ("Out", ["x y", "y"]),
            ("Out", ["def", "y"]),
            ("Out", ["y", "y"]),
            ("Out(object)", ["x", "y"]),
            ("class", ["x", "y"]),
            ("", ["x", "y"]),
        ]
    ),
    # operators
    *(
        Attack(target or "no operator", use(target), target, OperatorError)
        for target in [
            "",
            "add",
            "aten::add",
            "aten::add.",
            "aten::nothing.default",
            "aten::add.nothing",
            "aten::from_file.default",
            "aten::set_.source_Storage",
            "aten::resize_.default",
            "aten::record_stream.default",
            "aten::data.default",
            "aten::_print.default",
            "aten::add.out",
            "aten::normal.Tensor_float_out",
            "aten::max.dim_max",
            "aten::sort.values",
            "aten::topk.values",
            "aten::div.out_mode",
            "aten::xlogy.OutTensor",
            "aten::svd.U",
            "aten::add.__class__",
            "aten::add.__setattr__",
            "aten::add.__getattribute__",
            "aten::add._op",
            "aten::add.op",
            "aten::add.overloads",
            "aten::__class__.__subclasses__",
            "aten::add.Tensor.x",
            "torch::anything",
            "torch::load.default",
            "prims::add.default",
            "prim::Print.default",
            "quantized::add.default",
            "c10d::send.default",
            "python::eval",
            "python::exec",
            "python::attrgetter",
            "python::__import__",
            "builtins::open",
            "os::system",
            "math::factorial",
            "size::load",
        ]
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_forged_graph_is_refused(last: Path, attack: Attack) -> None:
    data = read(last)
    attack.change(data)
    write(last, data)
    with pytest.raises(attack.error) as caught:
        load_module(last)
    assert type(caught.value) is attack.error
    assert attack.says in str(caught.value)
    assert str(last / STAGE_FILE) in str(caught.value) or str(last / WEIGHTS_FILE) in str(caught.value)


def many(part: str, count: int, entry: object) -> Callable[[Json], object]:
    """Replace a part of the graph by ``count`` times the same entry."""
    return lambda data: train(data).update({part: [entry] * count})


LARGE = [
    Attack(
        "operations",
        many("operations", MAX_OPERATIONS + 1, {"name": "x", "target": "aten::abs.default", "args": []}),
        f"at most {MAX_OPERATIONS} are allowed",
    ),
    Attack("inputs", many("inputs", MAX_VALUES + 1, SIZE), f"at most {MAX_VALUES} are allowed"),
    Attack("outputs", many("outputs", MAX_VALUES + 1, ["x", 1]), f"at most {MAX_VALUES} are allowed"),
    Attack(
        "symbols",
        many("symbols", MAX_SYMBOLS + 1, {"name": "b", "minimum": 1, "maximum": 2}),
        f"at most {MAX_SYMBOLS} are allowed",
    ),
    Attack(
        "state",
        lambda d: d.update(state=[d["state"][0]] * (MAX_STATE_TENSORS + 1)),
        f"at most {MAX_STATE_TENSORS} are allowed",
    ),
    Attack(
        "dimensions of a tensor",
        lambda d: state(d, "scale").update(shape=[1] * (MAX_DIMENSIONS + 1)),
        f"at most {MAX_DIMENSIONS} are allowed",
    ),
    Attack(
        "dimensions of an input",
        lambda d: train(d)["inputs"][0].update(shape=[1] * (MAX_DIMENSIONS + 1)),
        f"at most {MAX_DIMENSIONS} are allowed",
    ),
    Attack("arguments", argument([0] * (MAX_ARGUMENTS + 1)), f"more than {MAX_ARGUMENTS} arguments"),
    Attack("nested arguments", argument([[0] * 200] * 200), f"more than {MAX_ARGUMENTS} arguments"),
    Attack("text", argument("a" * (MAX_TEXT + 1)), "is not an argument"),
    Attack("name", lambda d: operation(d).update(name="a" * (MAX_TEXT + 1)), "not an identifier"),
    Attack("name of a tensor", lambda d: rename(d, "a" * (MAX_TEXT + 1)), "not the name of a parameter"),
]


@pytest.mark.parametrize("attack", LARGE, ids=lambda attack: attack.name)
def test_a_stage_that_is_too_large(last: Path, attack: Attack) -> None:
    data = read(last)
    attack.change(data)
    with pytest.raises(StageFormatError) as caught:
        stage_from_json(data)
    assert attack.says in str(caught.value)
    assert len(str(caught.value)) < 2 * MAX_TEXT + 200


def call(target: str, *args: object, **kwargs: object) -> Callable[[Json], object]:
    """Replace the first operation by a call of ``target``."""
    return lambda data: operation(data).update(target=target, args=list(args), kwargs=kwargs)


CONSTANTS = [
    Attack("number as dtype", call("aten::zeros.default", [2], dtype=1000), "not a ScalarType"),
    Attack("sparse layout", call("aten::zeros.default", [2], layout=1), "not a Layout"),
    Attack("device as text", call("aten::zeros.default", [2], device="meta"), "not a Device"),
    Attack("generator", call("aten::rand.generator", [2], generator=1), "not a Generator"),
    Attack(
        "memory format as dtype",
        call("aten::zeros.default", [2], dtype={"memory_format": "channels_last"}),
        "not a ScalarType",
    ),
    Attack("dtype as size", call("aten::zeros.default", [{"dtype": "int64"}]), "size is a List[int]"),
    Attack("device as size", call("aten::zeros.default", {"device": "stage"}), "size is a List[int]"),
    Attack(
        "unknown reduction",
        call("aten::soft_margin_loss.default", 1, 1, 3),
        "reduction is not one of (0, 1, 2)",
    ),
    Attack("unknown name", call("aten::zeros.default", [2], code=1), "no argument 'code'"),
    Attack("argument twice", call("aten::zeros.default", [2], size=[2]), "or has it twice"),
    Attack("too many", call("aten::zeros.default", [2], 7), "at most 1 arguments"),
    Attack("named number", call("python::add", 1, b=2), "no argument 'b'"),
    Attack("quantized", call("aten::zeros.default", [2], dtype={"dtype": "qint8"}), "not a dtype"),
    Attack("raw bits", call("aten::zeros.default", [2], dtype={"dtype": "bits8"}), "not a dtype"),
]


@pytest.mark.parametrize("attack", CONSTANTS, ids=lambda attack: attack.name)
def test_an_argument_that_torch_would_take_for_something_else(last: Path, attack: Attack) -> None:
    """``aten::to.dtype`` with the dtype 1000 took all memory of the process."""
    data = read(last)
    attack.change(data)
    with pytest.raises(StageFormatError) as caught:
        stage_from_json(data)
    assert attack.says in str(caught.value)


def test_an_input_that_the_model_does_not_have(saved: Path) -> None:
    data = read(saved / "0")
    data["graphs"]["eval"]["inputs"][0]["name"] = "nobody"
    data["graphs"]["eval"]["operations"] = []
    data["graphs"]["eval"]["outputs"] = [["x", 1]]
    with pytest.raises(StageFormatError, match="eval graph: it takes an input"):
        stage_from_json(data)


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"a": -1}, "Expected `int` >= 0"),
        ({"a": 2**31}, "Expected `int` <= 2147483647"),
        ({"a..b": 1}, "not the path of a module"),
        ({"a\x1b[2J": 1}, "not the path of a module"),
        ({"a": 1.0}, "Expected `int`, got `float`"),
        ({str(number): 1 for number in range(11)}, "more than 10 modules"),
    ],
)
def test_forged_versions_of_modules(
    saved: Path, versions: Json, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ravnest.split.graph.MAX_MODULES", 10)
    data = read(saved / "0")
    data["module_versions"] = versions
    with pytest.raises(StageFormatError, match=says):
        stage_from_json(data)


def test_two_outputs_of_one_name(saved: Path) -> None:
    data = read(saved / "0")
    outputs = data["graphs"]["train"]["outputs"]
    outputs.append(outputs[0])
    with pytest.raises(StageFormatError, match="two outputs have the same name"):
        stage_from_json(data)


def test_an_operator_that_opens_files_is_not_run(last: Path, tmp_path: Path) -> None:
    target = tmp_path / "made by an attacker"
    data = read(last)
    operation(data).update(target="aten::from_file.default", args=[str(target), True, 8])
    write(last, data)
    with pytest.raises(OperatorError, match="aten::from_file"):
        load_module(last)
    assert not target.exists()


# --- the files -----------------------------------------------------------------------------------


def change_text(change: Callable[[str], str]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = folder / STAGE_FILE
        path.write_text(change(path.read_text()))

    return attack


def replaced(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / STAGE_FILE).write_bytes(content) and None


def make_pipe(folder: Path) -> None:
    (folder / STAGE_FILE).unlink()
    os.mkfifo(folder / STAGE_FILE)


def make_folder(folder: Path) -> None:
    (folder / STAGE_FILE).unlink()
    (folder / STAGE_FILE).mkdir()


def make_device(folder: Path) -> None:
    (folder / STAGE_FILE).unlink()
    (folder / STAGE_FILE).symlink_to("/dev/zero")


FILE_ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (replaced(b""), "not valid JSON"),
    "truncated": (change_text(lambda text: text[: len(text) // 2]), "not valid JSON"),
    "trailing bytes": (change_text(lambda text: text + "x"), "not valid JSON"),
    "not UTF-8": (replaced(b'{"format": "\xff\xfe"}'), "not valid JSON"),
    "a pickle": (replaced(b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00"), "not valid JSON"),
    "a number": (replaced(b"5"), "the stage is malformed"),
    "a list": (replaced(b"[]"), "the stage is malformed"),
    "null": (replaced(b"null"), "the stage is malformed"),
    "NaN": (change_text(lambda text: text.replace('"stage":2', '"stage":NaN')), "NaN is not JSON"),
    "Infinity": (
        change_text(lambda text: text.replace('"stage":2', '"stage":-Infinity')),
        "-Infinity is not JSON",
    ),
    "lists in lists": (replaced(b"[" * 100_000 + b"]" * 100_000), "not valid JSON"),
    "objects in objects": (replaced(b'{"a":' * 100_000), "not valid JSON"),
    "a number of 10,000 digits": (
        change_text(lambda text: text.replace('"stage":2', '"stage":' + "9" * 10_000)),
        "not valid JSON",
    ),
    "a pipe": (make_pipe, "is not a file"),
    "a folder": (make_folder, "is not a file"),
    "a device": (make_device, "is not a file"),
}


@pytest.mark.parametrize("name", FILE_ATTACKS)
def test_an_invalid_stage_file_is_refused(last: Path, name: str) -> None:
    attack, says = FILE_ATTACKS[name]
    before = (last / STAGE_FILE).read_bytes()
    attack(last)
    assert not (last / STAGE_FILE).is_file() or (last / STAGE_FILE).read_bytes() != before
    with pytest.raises(StageFormatError) as caught:
        load_module(last)
    assert says in str(caught.value)


@pytest.mark.parametrize("depth", range(850, 1000, 10))
def test_nesting_near_the_recursion_limit_is_refused(last: Path, depth: int) -> None:
    data = read(last)
    operation(data)["args"].append("HERE")
    text = json.dumps(data).replace('"HERE"', "[" * depth + "]" * depth)
    (last / STAGE_FILE).write_text(text)
    with pytest.raises(StageFormatError):
        load_module(last)


def test_a_large_file_is_refused_before_it_is_read(last: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (last / STAGE_FILE).stat().st_size
    monkeypatch.setattr(bundle, "MAX_STAGE_BYTES", size)
    load_module(last)
    monkeypatch.setattr(bundle, "MAX_STAGE_BYTES", size - 1)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the file was read"))
    with pytest.raises(StageFormatError, match=f"{size} bytes; at most {size - 1}"):
        load_module(last)


def test_the_digest_of_the_plan_must_match(last: Path) -> None:
    digest = sha256_of(last / STAGE_FILE)
    load_module(last, digest)
    wrong = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    for sha256 in (wrong, "", digest.upper()):
        with pytest.raises(StageFormatError, match="not the file that the plan describes"):
            load_module(last, sha256)
    (last / STAGE_FILE).write_text(json.dumps(read(last), indent=1))
    load_module(last)
    with pytest.raises(StageFormatError, match="not the file that the plan describes"):
        load_module(last, digest)


# --- the weights ---------------------------------------------------------------------------------


def split_weights(folder: Path) -> tuple[Json, bytes]:
    """Return header and data of the weights."""
    content = (folder / WEIGHTS_FILE).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_weights(folder: Path, header: Json | bytes, data: bytes, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    size = len(raw) if length is None else length
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", size) + raw + data)


def with_header(change: Callable[[Json], object]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        header, data = split_weights(folder)
        change(header)
        put_weights(folder, header, data)

    return attack


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = folder / WEIGHTS_FILE
        path.write_bytes(change(path.read_bytes()))

    return attack


def with_length(length: int) -> Callable[[Path], None]:
    return lambda folder: put_weights(folder, *split_weights(folder), length=length)


def with_raw_header(header: bytes) -> Callable[[Path], None]:
    return lambda folder: put_weights(folder, header, split_weights(folder)[1])


def _extra_tensor(header: Json) -> None:
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    header["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}


def _hole(header: Json) -> None:
    """Let a tensor skip its first bytes."""
    entry = header["embed.weight"]
    entry["shape"] = [10, 6]
    entry["data_offsets"][0] += 24


WEIGHT_ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (with_bytes(lambda content: b""), "truncated or not a safetensors file"),
    "seven bytes": (with_bytes(lambda content: content[:7]), "truncated or not a safetensors file"),
    "header only": (with_bytes(lambda content: content[:40]), "truncated"),
    "truncated by one": (with_bytes(lambda content: content[:-1]), "is truncated"),
    "truncated by half": (with_bytes(lambda content: content[: len(content) // 2]), "truncated"),
    "trailing byte": (with_bytes(lambda content: content + b"x"), "longer than it should be"),
    "trailing megabyte": (with_bytes(lambda content: content + bytes(1 << 20)), "longer than it"),
    "header of 2**63 bytes": (with_length(2**63), "truncated or not a safetensors file"),
    "header of 2**64 - 1 bytes": (with_length(2**64 - 1), "truncated or not a safetensors file"),
    "header of the whole file": (with_length(200), "damaged header"),
    "header of no bytes": (with_length(0), "damaged header"),
    "header is no JSON": (with_raw_header(b"{'a': 1}"), "damaged header"),
    "header is not UTF-8": (with_raw_header(b'{"\xff": 1}'), "damaged header"),
    "header is nested": (with_raw_header(b"[" * 50_000 + b"]" * 50_000), "damaged header"),
    "header is a list": (with_raw_header(b"[1, 2]"), "is damaged"),
    "header is a number": (with_raw_header(b"5"), "is damaged"),
    "tensor is a number": (with_header(lambda h: h.update({"embed.weight": 5})), "is damaged"),
    "tensor missing": (with_header(lambda h: h.pop("embed.weight")), "is damaged"),
    "tensor renamed": (
        with_header(lambda h: h.update({"other": h.pop("embed.weight")})),
        "lacks embed.weight",
    ),
    "extra tensor": (with_header(_extra_tensor), "has extra"),
    "shape": (with_header(lambda h: h["embed.weight"].update(shape=[6, 11])), "has shape [6, 11]"),
    "shape of 2**63": (with_header(lambda h: h["embed.weight"].update(shape=[2**63])), "is damaged"),
    "dtype": (with_header(lambda h: h["embed.weight"].update(dtype="I32")), "dtype torch.int32"),
    "unknown dtype": (with_header(lambda h: h["embed.weight"].update(dtype="PY")), "is damaged"),
    "dtype torch lacks": (
        with_header(lambda h: h["embed.weight"].update(dtype="F6_E2M3", shape=[352])),
        "is damaged",
    ),
    "offsets beyond the end": (
        with_header(lambda h: h["embed.weight"].update(data_offsets=[0, 2**40])),
        "is damaged",
    ),
    "negative offset": (
        with_header(lambda h: h["embed.weight"].update(data_offsets=[-8, 256])),
        "is damaged",
    ),
    "overlapping tensors": (
        with_header(lambda h: h["scale"].update(data_offsets=[0, 4])),
        "is damaged",
    ),
    "hole": (with_header(_hole), "is damaged"),
}


@pytest.mark.parametrize("name", WEIGHT_ATTACKS)
def test_forged_weights_are_refused(last: Path, name: str) -> None:
    attack, says = WEIGHT_ATTACKS[name]
    before = sha256_of(last / WEIGHTS_FILE)
    attack(last)
    assert sha256_of(last / WEIGHTS_FILE) != before, "the attack changed nothing"
    sign(last)
    with pytest.raises(StageFormatError) as caught:
        load_module(last)
    assert says in str(caught.value)
    assert str(last / WEIGHTS_FILE) in str(caught.value)


@pytest.mark.parametrize("place", [9, -1], ids=["header", "data"])
def test_a_flipped_bit_is_found(last: Path, place: int) -> None:
    content = bytearray((last / WEIGHTS_FILE).read_bytes())
    content[place] ^= 1
    (last / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(StageFormatError, match=r"weights\.safetensors"):
        load_module(last)


def test_a_flipped_bit_in_a_number_is_found_by_the_digest(last: Path) -> None:
    content = bytearray((last / WEIGHTS_FILE).read_bytes())
    content[-1] ^= 1
    (last / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(StageFormatError, match="changed or damaged: its sha256"):
        load_module(last)
    sign(last)
    load_module(last)


def test_weights_of_another_stage_are_refused(last: Path, saved: Path) -> None:
    (last / WEIGHTS_FILE).write_bytes((saved / "0" / WEIGHTS_FILE).read_bytes())
    sign(last)
    with pytest.raises(StageFormatError, match=r"weights\.safetensors"):
        load_module(last)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_weights_that_are_not_a_regular_file_are_refused(last: Path, kind: str) -> None:
    path = last / WEIGHTS_FILE
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(StageFormatError, match="is not a file"):
        load_module(last)


# --- random mutations ----------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 2**31, 2**63, 2**64, 10**30]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["*", "?", "b0", "0*b0", "__class__", "a..b", "float32", "int64", "parameter"]),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in ``data`` with each of its keys or indices."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in list(keys):
        yield data, key
        yield from places(data[key])


def mutate(data: Json, draw: st.DataObject) -> None:
    """Drop, replace, copy or repeat a random item."""
    found = list(places(data))
    box, key = found[draw.draw(st.integers(0, len(found) - 1), label="place")]
    match draw.draw(st.sampled_from(["drop", "junk", "copy", "repeat"]), label="change"):
        case "drop":
            del box[key]
        case "junk":
            box[key] = draw.draw(JUNK, label="junk")
        case "copy":
            other, place = found[draw.draw(st.integers(0, len(found) - 1), label="from")]
            box[key] = copy.deepcopy(other[place])
        case "repeat" if isinstance(box, list):
            box.append(copy.deepcopy(box[key]))
        case _:
            box[f"{key}x"] = copy.deepcopy(box[key])


@pytest.fixture(scope="session")
def scratch(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose ``stage.json`` may be overwritten, with the weights of the first stage."""
    folder = tmp_path_factory.mktemp("mutated")
    (folder / WEIGHTS_FILE).write_bytes((saved / "0" / WEIGHTS_FILE).read_bytes())
    return folder


@pytest.fixture(scope="session")
def originals(saved: Path) -> list[Json]:
    return [read(saved / str(index)) for index in range(3)]


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(draw=st.data())
def test_a_mutated_stage_loads_or_is_refused(
    saved: Path, scratch: Path, originals: list[Json], draw: st.DataObject
) -> None:
    index = draw.draw(st.integers(0, 2), label="stage")
    data = copy.deepcopy(originals[index])
    for _ in range(draw.draw(st.integers(1, 3), label="mutations")):
        mutate(data, draw)
    (scratch / WEIGHTS_FILE).write_bytes((saved / str(index) / WEIGHTS_FILE).read_bytes())
    write(scratch, data)
    try:
        module = load_module(scratch)
    except (StageFormatError, OperatorError):
        return
    again = json.loads(json.dumps(stage_to_json(module.spec), allow_nan=False))
    assert stage_from_json(again).index == module.spec.index
    assert all(isinstance(tensor, torch.Tensor) for tensor in module.state_tensors().values())
