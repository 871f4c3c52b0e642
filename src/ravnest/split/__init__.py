"""Split PyTorch models into stages that are plain data, and load stages as modules that train."""

from ravnest.split.chain import Chain
from ravnest.split.module import StageModule
from ravnest.split.self_check import SelfCheckResult, verify
from ravnest.split.splitter import PreparedModel, Split, SplitStage, prepare, split

__all__ = [
    "Chain",
    "PreparedModel",
    "SelfCheckResult",
    "Split",
    "SplitStage",
    "StageModule",
    "prepare",
    "split",
    "verify",
]
