"""Documented import path of ``clusterize``."""

from ravnest.formation import clusterize

__all__ = ["clusterize"]
