"""Averaging of parameters between clusters, in rounds over the rings of the plan.

Three layers: ``coordinator`` decides when clusters average and whether a round is committed, ``member``
represents a cluster at its Root, and ``service`` runs both in a thread, with links and clocks. Only
``service``, ``allreduce`` and ``peers`` have threads; everything else is pure.
"""
