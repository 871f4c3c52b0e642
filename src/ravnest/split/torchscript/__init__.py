"""TorchScript modules as plain ones that torch.export can trace."""

from ravnest.split.torchscript.adapter import from_torchscript

__all__ = ["from_torchscript"]
