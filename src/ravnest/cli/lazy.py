"""Commands that are imported on use, because most of them need torch, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class Lazy:
    """A command whose module is not imported yet."""

    module: str
    help: str
    """First paragraph of the command's own help."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``typer.Typer.command``."""

    def load(self, name: str) -> Any:
        """Import the module and return its function ``name``, or its ``app``, as a click command."""
        module = import_module(self.module)
        group = getattr(module, "app", None)
        if group is None:
            group = typer.Typer(add_completion=False, rich_markup_mode=None)
            group.command(name, **self.settings)(getattr(module, name))
        command = typer.main.get_command(group)
        command.name = name
        return command


class LazyGroup(TyperGroup):
    """Group that lists its commands without importing them and imports the one that runs."""

    lazy: dict[str, Lazy]

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names in the order in which users need them."""
        return list(self.lazy)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a placeholder that has only the help text."""
        known = self.lazy.get(cmd_name)
        return None if known is None else TyperCommand(cmd_name, help=known.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the imported command and the remaining arguments."""
        near = get_close_matches(args[0], self.lazy, n=1) if args[0] not in self.lazy else []
        if near:
            ctx.fail(f"No such command {args[0]!r}: did you mean {near[0]!r}?")
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.lazy[name].load(name) if name in self.lazy else command, rest
