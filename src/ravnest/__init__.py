"""Train PyTorch models too large for one machine, on other people's idle hardware."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ravnest.version import __version__

if TYPE_CHECKING:
    from ravnest.client.handle import JobHandle, attach
    from ravnest.client.submission import submit
    from ravnest.formation import clusterize
    from ravnest.jobs.job import Job
    from ravnest.provider.provide import provide
    from ravnest.runtime.node import Node
    from ravnest.runtime.trainer import Trainer
    from ravnest.seed import set_seed
    from ravnest.server.http.runner import serve
    from ravnest.sharding import shard
    from ravnest.store.trained import model_fusion

__all__ = [
    "Job",
    "JobHandle",
    "Node",
    "Trainer",
    "__version__",
    "attach",
    "clusterize",
    "model_fusion",
    "provide",
    "serve",
    "set_seed",
    "shard",
    "submit",
]

_MODULES = {
    "Job": "ravnest.jobs.job",
    "JobHandle": "ravnest.client.handle",
    "Node": "ravnest.runtime.node",
    "Trainer": "ravnest.runtime.trainer",
    "attach": "ravnest.client.handle",
    "clusterize": "ravnest.formation",
    "model_fusion": "ravnest.store.trained",
    "provide": "ravnest.provider.provide",
    "serve": "ravnest.server.http.runner",
    "set_seed": "ravnest.seed",
    "shard": "ravnest.sharding",
    "submit": "ravnest.client.submission",
}
"""Module of each public name; it is imported on first use, because most import torch.

No module directly below ``ravnest`` may have one of these names: it would hide the public name.
"""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
