"""Documented import path of ``Node``."""

from ravnest.runtime.node import Node

__all__ = ["Node"]
