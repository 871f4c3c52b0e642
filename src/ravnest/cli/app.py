"""The ``ravnest`` command."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli import fuse, launch, plan
from ravnest.errors import RavnestError
from ravnest.version import __version__

app = typer.Typer(
    help="Train PyTorch models that one machine cannot hold, on idle, unequal machines of many people.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command(
    "launch",
    # Options after the script are the script's.
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(launch.launch)
app.command("fuse")(fuse.fuse)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ravnest {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say more about what happens.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")


def main() -> None:
    """Run the command; an error of the user's is one message and exit code 1."""
    try:
        app()
    except RavnestError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_escaped(error)}", soft_wrap=True)
        sys.exit(1)


def _escaped(error: Exception) -> str:
    return str(error).replace("[", "\\[")
