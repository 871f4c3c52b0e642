"""``ravnest plan``: show a plan without writing or submitting anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ravnest.cli.console import err, out, print_json, progress_bars
from ravnest.cli.estimate_text import estimate_lines
from ravnest.cli.exit_codes import ExitCode
from ravnest.cli.options import Json, Quiet, Server, Token
from ravnest.cli.target import TargetError, call_target
from ravnest.client.estimation import request_estimate
from ravnest.client.server_selection import select_server
from ravnest.formation import NODE_CONFIGS, NODE_DATA, form_clusters
from ravnest.jobs.job import Job
from ravnest.plan.node_configs import read_node_configs


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Function that returns a ravnest.Job, to plan for the providers of a server, or the "
            "model and its example inputs, to plan for --nodes: (model, args), (model, kwargs) or "
            "(model, args, kwargs).",
        ),
    ],
    nodes: Annotated[Path, typer.Option(help="Node configurations to plan for.")] = Path(NODE_DATA)
    / NODE_CONFIGS,
    clusters: Annotated[int | None, typer.Option(min=1, help="Number of clusters to form.")] = None,
    pass_data: Annotated[
        bool, typer.Option("--pass-data", help="Measure costs with a real forward pass.")
    ] = False,
    update_frequency: Annotated[int, typer.Option(min=1, help="Micro-batches per update.")] = 1,
    server: Server = None,
    token: Token = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show how a job or a model would be split; submit nothing.

    For a job, the server says if it fits its providers or what is missing, and what the training would
    take. Weights and data are not uploaded. The exit code is 1 if the job does not fit.
    """
    found = call_target(target)
    if isinstance(found, Job):
        _estimate(found, server, token, quiet=quiet, as_json=as_json)
        return
    if server is not None:
        kind = type(found).__name__
        raise TargetError(f"{target} must return a ravnest.Job for a plan of a server, got {kind}")
    model, args, kwargs = model_and_example(target, found)
    formation = form_clusters(
        model,
        args,
        kwargs,
        nodes=read_node_configs(nodes),
        clusters=clusters,
        pass_data=pass_data,
        update_frequency=update_frequency,
    )
    if as_json:
        print_json(formation.plan)
    else:
        out().print(formation.explain())


def _estimate(job: Job, server: str | None, token: str | None, *, quiet: bool, as_json: bool) -> None:
    """Ask a server for the estimate of a job and print it."""
    with select_server(server, token).api() as api:
        api.get("/api/health", object)  # capturing takes time: fail first if no server answers
        with progress_bars(err(quiet=quiet)) as bars:
            found = request_estimate(api, job, bars.update)
    if as_json:
        print_json(found)
    else:
        out().print("\n".join(estimate_lines(found)))
    if not found.fits:
        raise typer.Exit(ExitCode.ERROR)


def model_and_example(
    target: str, result: object
) -> tuple[torch.nn.Module, Sequence[Any], Mapping[str, Any]]:
    """Return the model, args and kwargs of what the user's function returned."""
    if not isinstance(result, tuple) or not result or not isinstance(result[0], torch.nn.Module):
        kind = type(result).__name__
        raise TargetError(
            f"{target} must return (model, args), (model, args, kwargs) or a ravnest.Job, got {kind}"
        )
    model, *examples = result
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    for example in examples:
        if isinstance(example, Mapping):
            kwargs = example
        elif isinstance(example, torch.Tensor):
            args = (example,)
        elif isinstance(example, Sequence):
            args = example
        else:
            kind = type(example).__name__
            raise TargetError(f"{target} must return example inputs after the model, got {kind}")
    return model, args, kwargs
