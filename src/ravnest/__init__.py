"""Train PyTorch models that one machine cannot hold, on idle, unequal machines of many people."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ravnest.version import __version__

if TYPE_CHECKING:
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
    "Node",
    "Trainer",
    "__version__",
    "clusterize",
    "model_fusion",
    "provide",
    "serve",
    "set_seed",
    "shard",
    "submit",
]

_HOMES = {
    "Job": "ravnest.jobs.job",
    "Node": "ravnest.runtime.node",
    "Trainer": "ravnest.runtime.trainer",
    "clusterize": "ravnest.formation",
    "model_fusion": "ravnest.store.trained",
    "provide": "ravnest.provider.provide",
    "serve": "ravnest.server.http.runner",
    "set_seed": "ravnest.seed",
    "shard": "ravnest.sharding",
    "submit": "ravnest.client.submission",
}
"""Where each name lives; it is imported when it is first used, and torch with it.

No module of the package may have one of these names: it would be found in the name's place.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
