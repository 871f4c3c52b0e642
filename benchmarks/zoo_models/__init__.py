"""The models that the splitter is proven on: small, with random weights, each built on demand.

Importing this costs a torch import; torchvision, timm and transformers load when one of their
models is made.
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
    """The model called ``name``; ``ValueError`` if there is none."""
    for model in ZOO:
        if model.name == name:
            return model
    raise ValueError(f"no model is called {name!r}; see docs/zoo.md for the names")


__all__ = ["BATCH", "ZOO", "Example", "Source", "ZooModel", "find"]
