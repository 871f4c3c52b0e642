"""Public names, import paths and signatures as documented."""

import inspect
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

import ravnest
import ravnest.node
import ravnest.operations.utils
import ravnest.trainer
import ravnest.utils


def test_public_names() -> None:
    assert ravnest.__all__ == [
        "Callbacks",
        "Job",
        "JobHandle",
        "Node",
        "NodeMetrics",
        "RunLog",
        "Trainer",
        "__version__",
        "attach",
        "clusterize",
        "estimate",
        "model_fusion",
        "provide",
        "serve",
        "set_seed",
        "shard",
        "submit",
    ]
    assert all(hasattr(ravnest, name) for name in ravnest.__all__)


def test_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev)\d+)?", ravnest.__version__)


def test_documented_import_paths_give_the_same_objects() -> None:
    assert ravnest.operations.utils.clusterize is ravnest.clusterize
    assert ravnest.utils.model_fusion is ravnest.model_fusion
    assert ravnest.utils.set_seed is ravnest.set_seed
    assert ravnest.node.Node is ravnest.Node
    assert ravnest.trainer.Trainer is ravnest.Trainer


def test_signature_of_clusterize() -> None:
    parameters = inspect.signature(ravnest.clusterize).parameters
    documented = {"model": None, "example_args": (), "example_kwargs": {}, "pass_data": False}
    assert list(parameters)[:4] == list(documented)
    for name, default in documented.items():
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameters[name].default == default, f"the default of {name}"
    others = list(parameters.values())[4:]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in others)
    assert all(p.default is not inspect.Parameter.empty for p in others)


def test_defaults_of_clusterize_cannot_be_changed_by_a_call() -> None:
    default = inspect.signature(ravnest.clusterize).parameters["example_kwargs"].default
    with pytest.raises(TypeError):
        default["x"] = 1


def test_signatures_of_model_fusion_and_set_seed() -> None:
    fusion = inspect.signature(ravnest.model_fusion).parameters
    assert next(iter(fusion)) == "cluster_id"
    assert fusion["cluster_id"].default == 0
    assert [(p.name, p.default) for p in inspect.signature(ravnest.set_seed).parameters.values()] == [
        ("seed", 42)
    ]


NODE = {
    "name": None,
    "model": None,
    "optimizer": None,
    "optimizer_params": {},
    "lr_scheduler": None,
    "lr_scheduler_params": {},
    "lr_step_on_epoch_change": True,
    "criterion": None,
    "update_frequency": 1,
    "reduce_factor": None,
    "labels": None,
    "test_labels": None,
    "device": torch.device,
    "loss_filename": "losses.txt",
    "compression": False,
    "average_optim": False,
}
TRAINER = {
    "node": None,
    "lr_scheduler": None,
    "lr_scheduler_params": {},
    "train_loader": None,
    "val_loader": None,
    "val_freq": 1,
    "save": False,
    "epochs": 1,
    "batch_size": 64,
    "step_size": 1,
    "inputs_dtype": None,
    "resume": False,
}
BUFFERS = (
    "load_forward_buffer",
    "load_backward_buffer",
    "reduce_ring_buffers",
    "gather_ring_buffers",
    "latest_weights_buffer",
    "forward_lock",
    "backward_lock",
    "reduce_lock",
    "gather_lock",
    "latest_weights_lock",
    "reduce_iteration",
    "gather_iteration",
)


def test_signatures_of_submit_and_attach() -> None:
    submit = inspect.signature(ravnest.submit).parameters
    assert parameters_of(ravnest.submit) == {"job": None}
    assert takes_keywords(ravnest.submit), "the fields of a job"
    assert {"server", "token", "serve_here", "progress"} <= set(submit)
    fields = set(inspect.signature(ravnest.Job).parameters)
    assert not fields & set(submit), "no option hides a field of a job"
    assert list(parameters_of(ravnest.attach).items())[1:] == [("server", None)]


def parameters_of(function: Any) -> dict[str, Any]:
    """Return the parameters that can be given by position, with their defaults."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}


def takes_keywords(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


@pytest.mark.parametrize(("made", "documented"), [(ravnest.Node, NODE), (ravnest.Trainer, TRAINER)])
def test_signatures_of_node_and_trainer(made: type, documented: dict[str, Any]) -> None:
    found = parameters_of(made)
    assert list(found) == list(documented)
    for name, default in documented.items():
        if default == {}:
            assert dict(found[name]) == {}, f"the default of {name}"
            with pytest.raises(TypeError):
                found[name]["x"] = 1  # a default that a call could change would affect all calls
        else:
            assert found[name] == default, f"the default of {name}"


@pytest.mark.parametrize(
    ("method", "documented", "keywords"),
    [
        ("forward_compute", {"tensors": None}, True),
        ("no_grad_forward_compute", {"tensors": None, "output_type": None}, True),
        ("init_server", dict.fromkeys(BUFFERS), False),
        ("check_load_forward_buffer", {}, False),
        ("reset", {}, False),
        ("start", {}, False),
        ("start_grpc_server", {}, False),
        ("wait_for_backwards", {}, False),
    ],
)
def test_methods_of_node(method: str, documented: dict[str, Any], keywords: bool) -> None:
    function = getattr(ravnest.Node, method)
    assert parameters_of(function) == documented
    assert list(parameters_of(function)) == list(documented)
    assert takes_keywords(function) is keywords


def test_methods_of_trainer() -> None:
    for name in ("train", "evaluate", "prelim_checks"):
        assert parameters_of(getattr(ravnest.Trainer, name)) == {}
    assert list(inspect.signature(ravnest.Trainer.pred).parameters) == ["self", "input"]


def test_only_node_takes_further_keywords() -> None:
    assert takes_keywords(ravnest.Node)
    assert not takes_keywords(ravnest.Trainer)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture
def untouched_generators() -> Any:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.usefixtures("untouched_generators")
@pytest.mark.parametrize("seed", [0, 7, 42, 2**32 - 1])
def test_set_seed_resets_every_generator(seed: int) -> None:
    ravnest.set_seed(seed)
    first = draw()
    assert all(a != b for a, b in zip(first, draw(), strict=True)), "the generators do not advance"
    ravnest.set_seed(seed)
    assert draw() == first


@pytest.mark.usefixtures("untouched_generators")
def test_seeds_differ_and_42_is_the_default() -> None:
    ravnest.set_seed()
    default = draw()
    ravnest.set_seed(42)
    assert draw() == default
    ravnest.set_seed(43)
    assert all(a != b for a, b in zip(draw(), default, strict=True))


@pytest.mark.usefixtures("untouched_generators")
@pytest.mark.parametrize("seed", [-1, 2**32, True, 1.0, "42", None])
def test_a_bad_seed_is_refused_before_any_generator_changes(seed: Any) -> None:
    ravnest.set_seed(5)
    expected = draw()
    ravnest.set_seed(5)
    with pytest.raises(ValueError, match=re.escape(f"2**32 - 1, not {seed!r}")):
        ravnest.set_seed(seed)
    assert draw() == expected
