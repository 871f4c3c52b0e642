"""Train PyTorch models that one machine cannot hold, on idle, unequal machines of many people."""

from ravnest.formation import clusterize
from ravnest.runtime.node import Node
from ravnest.runtime.trainer import Trainer
from ravnest.seed import set_seed
from ravnest.shard import shard
from ravnest.store.trained import model_fusion
from ravnest.version import __version__

__all__ = ["Node", "Trainer", "__version__", "clusterize", "model_fusion", "set_seed", "shard"]
