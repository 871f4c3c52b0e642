"""Split PyTorch models into stages that are plain data, and load stages as modules that train."""

from typing import TYPE_CHECKING

from ravnest.lazy_names import lazy_names

if TYPE_CHECKING:
    from ravnest.split.chain import Chain
    from ravnest.split.module import StageModule
    from ravnest.split.self_check import SelfCheckResult, verify
    from ravnest.split.split_stage import SplitStage
    from ravnest.split.splitter import PreparedModel, Split, prepare, split

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

_MODULES = {
    "Chain": "ravnest.split.chain",
    "PreparedModel": "ravnest.split.splitter",
    "SelfCheckResult": "ravnest.split.self_check",
    "Split": "ravnest.split.splitter",
    "SplitStage": "ravnest.split.split_stage",
    "StageModule": "ravnest.split.module",
    "prepare": "ravnest.split.splitter",
    "split": "ravnest.split.splitter",
    "verify": "ravnest.split.self_check",
}
"""Module of each public name: those that load stages do not import the compiler that captures models."""

__getattr__, __dir__ = lazy_names(globals(), _MODULES)
