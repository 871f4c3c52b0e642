"""Convert TorchScript modules to plain modules that torch.export can trace."""

from ravnest.split.torchscript.adapter import from_torchscript

__all__ = ["from_torchscript"]
