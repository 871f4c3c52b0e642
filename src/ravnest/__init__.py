"""Train PyTorch models too large for one machine, on other people's idle hardware."""

from typing import TYPE_CHECKING

from ravnest.lazy_names import lazy_names
from ravnest.version import __version__

if TYPE_CHECKING:
    from ravnest.client.estimation import estimate
    from ravnest.client.handle import JobHandle, attach
    from ravnest.client.submission import submit
    from ravnest.formation import clusterize
    from ravnest.jobs.job import Job
    from ravnest.logs.callbacks import Callbacks
    from ravnest.logs.node_metrics import NodeMetrics
    from ravnest.logs.run_log import RunLog
    from ravnest.provider.provide import provide
    from ravnest.runtime.node import Node
    from ravnest.runtime.trainer import Trainer
    from ravnest.seed import set_seed
    from ravnest.server.http.runner import serve
    from ravnest.sharding import shard
    from ravnest.store.trained import model_fusion

__all__ = [
    "Callbacks",
    "Job",
    "JobHandle",
    "Node",
    "NodeMetrics",
    "RunLog",
    "Trainer",
    "__version__",
    "attach",
    "clusterize",
    "estimate",
    "model_fusion",
    "provide",
    "serve",
    "set_seed",
    "shard",
    "submit",
]

_MODULES = {
    "Callbacks": "ravnest.logs.callbacks",
    "Job": "ravnest.jobs.job",
    "JobHandle": "ravnest.client.handle",
    "Node": "ravnest.runtime.node",
    "NodeMetrics": "ravnest.logs.node_metrics",
    "RunLog": "ravnest.logs.run_log",
    "Trainer": "ravnest.runtime.trainer",
    "attach": "ravnest.client.handle",
    "clusterize": "ravnest.formation",
    "estimate": "ravnest.client.estimation",
    "model_fusion": "ravnest.store.trained",
    "provide": "ravnest.provider.provide",
    "serve": "ravnest.server.http.runner",
    "set_seed": "ravnest.seed",
    "shard": "ravnest.sharding",
    "submit": "ravnest.client.submission",
}
"""Module of each public name; it is imported on first use, because most import torch."""

__getattr__, __dir__ = lazy_names(globals(), _MODULES)
