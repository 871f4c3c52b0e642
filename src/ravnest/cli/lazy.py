"""Commands whose modules are imported when they are used: most need torch, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class Lazy:
    """A command before its module is there."""

    module: str
    help: str
    """The first line of its own help."""
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> Any:
        """The command itself: the module's function of its name, or its ``app`` if it has several."""
        module = import_module(self.module)
        made = getattr(module, "app", None)
        if made is None:
            made = typer.Typer(add_completion=False)
            made.command(name, **self.settings)(getattr(module, name))
        command = typer.main.get_command(made)
        command.name = name
        return command


class LazyGroup(TyperGroup):
    """Lists its commands without loading them, and loads the one that is run or completed."""

    lazy: dict[str, Lazy]

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """In the order in which people need them."""
        return list(self.lazy)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """A stand-in that knows its help only."""
        known = self.lazy.get(cmd_name)
        return None if known is None else TyperCommand(cmd_name, help=known.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, and the arguments that are its own."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.lazy[name].load(name) if name in self.lazy else command, rest
