"""Documented import path of ``clusterize``, which lives in ``ravnest.formation``."""
