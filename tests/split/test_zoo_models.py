"""A handful of the zoo, checked as `make zoo` checks all of it: without the splitter's own code."""

import pytest
import zoo
from zoo_models import ZOO, find
from zoo_models.exactness import Unsplit, compare, record_training
from zoo_models.examination import BITWISE, Finding

from ravnest.errors import SplitError
from ravnest.split import Chain, split

HANDFUL = [
    ("tied-gpt", 2),
    ("tied-gpt", 3),
    ("tied-gpt", 4),
    ("unet", 3),
    ("lstm-tagger", 3),
    ("vector-quantised", 3),
    ("torchvision-vit", 3),
    ("torchvision-mnasnet0-5", 3),  # its loading insists on the versions of its modules
    ("timm-convnext-atto", 3),
    ("bert-classifier", 3),
    ("t5", 3),
    ("scripted-control-flow", 3),
]


@pytest.mark.parametrize(("name", "stages"), HANDFUL)
def test_stages_train_as_the_model_does_to_the_last_bit(name, stages):
    model, args, kwargs = find(name).build()
    expected = record_training(Unsplit(find(name).build()[0]), args, kwargs)

    chain = Chain.of(split(model, args, kwargs, stages=stages))
    actual = record_training(chain, args, kwargs)

    assert compare(expected, actual) is None
    assert list(chain.state_dict()) == list(model.state_dict())
    model.load_state_dict(chain.state_dict(), strict=True)


@pytest.mark.parametrize("name", ["data-dependent-branch", "custom-autograd-function"])
def test_what_cannot_be_captured_is_refused_with_its_reason(name):
    entry = find(name)
    model, args, kwargs = entry.build()
    with pytest.raises(SplitError) as refusal:
        split(model, args, kwargs, stages=2)
    assert entry.refusal in str(refusal.value)


def test_every_model_of_the_zoo_has_a_name_of_its_own():
    names = [model.name for model in ZOO]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no model is called 'resnet'"):
        find("resnet")


def test_a_run_that_is_cut_short_has_models_that_split_and_models_that_are_refused():
    refused = [name for name in zoo.FIRST if find(name).refusal is not None]
    assert 3 <= len(refused) < len(zoo.FIRST) / 2


def test_the_page_tells_the_command_that_makes_it():
    split_one = Finding("one", "timm", 10, 5, 1.5, dict.fromkeys("234", BITWISE), ok=True)
    refused_one = Finding("two", "torch.nn", refusal="a.py:1: x | y\nno", ok=True)

    limited = zoo.render([split_one, refused_one], minutes=16.2, limit=15)
    assert '`make zoo ARGS="--minutes 15"` (16 minutes on' in limited
    assert f"{len(ZOO) - 2} of the zoo's {len(ZOO)} models are not in it" in limited
    assert "| one | timm | 10 | 5 | bitwise | bitwise | bitwise | 1.5 |" in limited
    assert "| two | torch.nn | a.py:1: x \\| y no |" in limited

    assert "`make zoo` (90 minutes on" in zoo.render([split_one], minutes=90)
