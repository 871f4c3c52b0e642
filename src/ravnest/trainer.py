"""Documented import path of ``Trainer``."""

from ravnest.runtime.trainer import Trainer

__all__ = ["Trainer"]
