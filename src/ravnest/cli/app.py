"""The ``ravnest`` command."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.exit_codes import EXPLAINED, code_of
from ravnest.cli.lazy import Lazy, LazyGroup
from ravnest.errors import RavnestError
from ravnest.version import __version__


class Commands(LazyGroup):
    """All commands; each is a module."""

    lazy = {  # noqa: RUF012  # nobody changes it
        "demo": Lazy("ravnest.cli.demo", "See it all work on this machine, in one command."),
        "serve": Lazy("ravnest.cli.serve", "Run the intermediary server until Ctrl-C."),
        "token": Lazy("ravnest.cli.token", "Tokens to join a server with."),
        "provide": Lazy(
            "ravnest.cli.provide", "Offer this machine to a server, and work for its jobs until Ctrl-C."
        ),
        "submit": Lazy(
            "ravnest.cli.submit",
            "Have a model trained; shows how it goes, and brings the trained model home.",
        ),
        "status": Lazy("ravnest.cli.status", "Show your jobs: where each is, and why."),
        "logs": Lazy(
            "ravnest.cli.logs",
            "Show what happened to a job and why; with --json one event a line.",
        ),
        "cancel": Lazy("ravnest.cli.cancel", "End a job; its providers become free for others."),
        "fetch": Lazy(
            "ravnest.cli.fetch",
            "Download the trained model as `trained_state_dict.pt`; waits for a job that still trains.",
        ),
        "nodes": Lazy(
            "ravnest.cli.nodes", "Show the providers of a server, or write them down for `clusterize`."
        ),
        "plan": Lazy(
            "ravnest.cli.plan",
            "Show how a model would be split over the nodes, and what to expect. Writes nothing.",
        ),
        "launch": Lazy(
            "ravnest.cli.launch",
            "Start every node that lives on this machine, as `python SCRIPT node_<i> ARGS...`.",
            # Options after the script are the script's.
            {"context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": True}},
        ),
        "fuse": Lazy(
            "ravnest.cli.fuse",
            "Combine a cluster's trained stages into one state_dict for the original model.",
        ),
    }


app = typer.Typer(
    cls=Commands,
    help="Train PyTorch models that one machine cannot hold, on idle, unequal machines of many people.",
    epilog=EXPLAINED,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of each request


def main() -> None:
    """Run the command; an error of ours is one message, and the code that ``ExitCode`` says."""
    try:
        app(prog_name="ravnest")
    except RavnestError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_escaped(error)}", soft_wrap=True)
        sys.exit(code_of(error))


def _escaped(error: Exception) -> str:
    return str(error).replace("[", "\\[")


if __name__ == "__main__":
    main()
