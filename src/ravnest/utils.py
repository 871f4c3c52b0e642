"""Documented import path of ``model_fusion`` and ``set_seed``."""

from ravnest.seed import set_seed
from ravnest.store.trained import model_fusion

__all__ = ["model_fusion", "set_seed"]
