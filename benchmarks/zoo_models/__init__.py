"""Models that test the splitter: small, with random weights, each built on demand.

Importing this package imports torch only; torchvision, timm and transformers are imported when one of
their models is built.
"""

from zoo_models import corners, hugging_face, refused, scripted, vision, written
from zoo_models.registry import BATCH, Example, Source, ZooModel

ZOO: tuple[ZooModel, ...] = (
    *vision.MODELS,
    *hugging_face.MODELS,
    *written.MODELS,
    *corners.MODELS,
    *scripted.MODELS,
    *refused.MODELS,
)


def find(name: str) -> ZooModel:
    """Return the model called ``name``; raise ``ValueError`` if there is none."""
    for model in ZOO:
        if model.name == name:
            return model
    raise ValueError(f"no model is called {name!r}; see docs/zoo.md for the names")


__all__ = ["BATCH", "ZOO", "Example", "Source", "ZooModel", "find"]
