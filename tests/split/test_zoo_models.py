"""Some models of the zoo, checked like `make zoo` checks all: without the splitter's own check."""

import pytest
import zoo
from zoo_models import ZOO, find
from zoo_models.exactness import Unsplit, compare, record_training
from zoo_models.examination import BITWISE, Finding

from ravnest.errors import SplitError
from ravnest.split import Chain, split

SOME = [
    pytest.param("tied-gpt", 2, marks=pytest.mark.full),
    ("tied-gpt", 3),
    pytest.param("tied-gpt", 4, marks=pytest.mark.full),
    ("unet", 3),
    pytest.param("lstm-tagger", 3, marks=pytest.mark.full),
    ("vector-quantised", 3),
    ("torchvision-vit", 3),
    # Loads only with the versions of its modules.
    pytest.param("torchvision-mnasnet0-5", 3, marks=pytest.mark.full),
    pytest.param("timm-convnext-atto", 3, marks=pytest.mark.full),
    ("bert-classifier", 3),
    pytest.param("t5", 3, marks=pytest.mark.full),
    ("scripted-control-flow", 3),
]


@pytest.mark.parametrize(("name", "stages"), SOME)
def test_stages_train_as_the_model_does_to_the_last_bit(name, stages):
    model, args, kwargs = find(name).build()
    expected = record_training(Unsplit(find(name).build()[0]), args, kwargs)

    chain = Chain.of(split(model, args, kwargs, stages=stages))
    actual = record_training(chain, args, kwargs)

    assert compare(expected, actual) is None
    assert list(chain.state_dict()) == list(model.state_dict())
    model.load_state_dict(chain.state_dict(), strict=True)


@pytest.mark.parametrize("name", ["data-dependent-branch", "custom-autograd-function"])
def test_models_that_cannot_be_captured_are_rejected_with_a_reason(name):
    entry = find(name)
    model, args, kwargs = entry.build()
    with pytest.raises(SplitError) as error:
        split(model, args, kwargs, stages=2)
    assert entry.refusal in str(error.value)


def test_names_of_the_zoo_are_unique():
    names = [model.name for model in ZOO]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_rejected():
    with pytest.raises(ValueError, match="no model is called 'resnet'"):
        find("resnet")


def test_a_limited_run_has_models_that_split_and_models_that_are_rejected():
    rejected = [name for name in zoo.FIRST if find(name).refusal is not None]
    assert 3 <= len(rejected) < len(zoo.FIRST) / 2


def test_the_page_names_the_command_that_writes_it():
    exact = Finding("one", "timm", 10, 5, 1.5, dict.fromkeys("234", BITWISE), ok=True)
    rejected = Finding("two", "torch.nn", refusal="a.py:1: x | y\nno", ok=True)

    limited = zoo.render([exact, rejected], minutes=16.2, limit=15)
    assert '`make zoo ARGS="--minutes 15"` (16 minutes on' in limited
    assert f"{len(ZOO) - 2} of the zoo's {len(ZOO)} models are missing" in limited
    assert "| one | timm | 10 | 5 | bitwise | bitwise | bitwise | 1.5 |" in limited
    assert "| two | torch.nn | a.py:1: x \\| y no |" in limited

    assert "`make zoo` (90 minutes on" in zoo.render([exact], minutes=90)
