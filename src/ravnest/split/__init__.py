"""From a PyTorch model to stages that are data, and back to modules that train."""

from ravnest.split.chain import Chain
from ravnest.split.module import StageModule
from ravnest.split.selfcheck import Verdict, verify
from ravnest.split.splitter import PreparedModel, Split, Stage, prepare, split

__all__ = [
    "Chain",
    "PreparedModel",
    "Split",
    "Stage",
    "StageModule",
    "Verdict",
    "prepare",
    "split",
    "verify",
]
