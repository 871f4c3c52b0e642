"""Entry point of the ``ravnest`` command."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.exit_codes import EXIT_CODES_HELP, ExitCode, exit_code_for
from ravnest.cli.lazy import Lazy, LazyGroup
from ravnest.errors import RavnestError
from ravnest.host import explained
from ravnest.version import __version__


class Commands(LazyGroup):
    """All commands, each in a module of its own."""

    lazy = {  # noqa: RUF012  # never changed
        "demo": Lazy("ravnest.cli.demo", "Run a server, providers and a job on this machine."),
        "serve": Lazy("ravnest.cli.serve", "Run the intermediary server until Ctrl-C."),
        "token": Lazy("ravnest.cli.token", "Create tokens for joining a server."),
        "member": Lazy("ravnest.cli.member", "List the members of a server, and revoke credentials."),
        "provide": Lazy(
            "ravnest.cli.provide", "Offer this machine to a server and work on its jobs until Ctrl-C."
        ),
        "relay": Lazy("ravnest.cli.relay", "Run a relay for the jobs of a server until Ctrl-C."),
        "submit": Lazy(
            "ravnest.cli.submit", "Submit a job, show its progress and download the trained model."
        ),
        "status": Lazy("ravnest.cli.status", "Show the state and progress of your jobs."),
        "page": Lazy("ravnest.cli.page", "Print a link that shows your jobs in a browser."),
        "logs": Lazy("ravnest.cli.logs", "Show the events of a job and their reasons."),
        "trace": Lazy("ravnest.cli.trace", "Write what each node of a run did when, for Perfetto."),
        "cancel": Lazy("ravnest.cli.cancel", "Cancel a job and free its providers."),
        "fetch": Lazy(
            "ravnest.cli.fetch", "Wait for a job and download the model as `trained_state_dict.pt`."
        ),
        "forget": Lazy(
            "ravnest.cli.forget", "Forget a server that you joined, for example one that is gone."
        ),
        "nodes": Lazy(
            "ravnest.cli.nodes", "Show the providers of a server, or write a `node_configs.json`."
        ),
        "plan": Lazy("ravnest.cli.plan", "Show how a job or a model would be split; submit nothing."),
        "launch": Lazy(
            "ravnest.cli.launch",
            "Start all nodes of this machine, each with the same script.",
            # Options after the script belong to the script.
            {"context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": True}},
        ),
        "fuse": Lazy("ravnest.cli.fuse", "Fuse a cluster's trained stages into one state_dict."),
    }


app = typer.Typer(
    cls=Commands,
    help="Train PyTorch models too large for one machine, on other people's idle hardware.",
    epilog=EXIT_CODES_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables show a type for each flag, and take half of the width
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"ravnest {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more details.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


def main() -> None:
    """Run the command; print a ``RavnestError`` as one message and exit with its ``ExitCode``.

    Errors of the system, such as a full disk, are one message too; ``--verbose`` shows where they arose.
    """
    try:
        app(prog_name="ravnest")
    except RavnestError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_escaped(error)}", soft_wrap=True)
        sys.exit(exit_code_for(error))
    except OSError as error:
        logging.getLogger(__name__).info("the command failed", exc_info=True)
        Console(stderr=True).print(f"[bold red]error:[/] {_escaped(explained(error))}", soft_wrap=True)
        sys.exit(ExitCode.ERROR)


def _escaped(error: Exception | str) -> str:
    return str(error).replace("[", "\\[")


if __name__ == "__main__":
    main()
