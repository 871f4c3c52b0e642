"""``clusterize`` under its documented path."""

from ravnest.formation import clusterize

__all__ = ["clusterize"]
