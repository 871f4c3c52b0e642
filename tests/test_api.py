"""The names, paths and signatures that the documentation promises."""

import inspect
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

import ravnest
import ravnest.operations.utils
import ravnest.utils


def test_public_names() -> None:
    assert ravnest.__all__ == ["__version__", "clusterize", "model_fusion", "set_seed"]
    assert all(hasattr(ravnest, name) for name in ravnest.__all__)


def test_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev)\d+)?", ravnest.__version__)


def test_documented_paths_lead_to_the_same_functions() -> None:
    assert ravnest.operations.utils.clusterize is ravnest.clusterize
    assert ravnest.utils.model_fusion is ravnest.model_fusion
    assert ravnest.utils.set_seed is ravnest.set_seed


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
def test_set_seed_makes_every_generator_repeat(seed: int) -> None:
    ravnest.set_seed(seed)
    first = draw()
    assert all(a != b for a, b in zip(first, draw(), strict=True)), "the generators stand still"
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
