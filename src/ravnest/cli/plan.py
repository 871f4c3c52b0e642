"""``ravnest plan``: what a plan would look like, without writing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ravnest.cli.target import TargetError, call_target
from ravnest.formation import NODE_CONFIGS, NODE_DATA, form_clusters
from ravnest.plan.node_configs import read_node_configs


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that returns the model and its example inputs: (model, args), "
            "(model, kwargs) or (model, args, kwargs).",
        ),
    ],
    nodes: Annotated[Path, typer.Option(help="The node configurations to plan for.")] = Path(NODE_DATA)
    / NODE_CONFIGS,
    clusters: Annotated[int | None, typer.Option(min=1, help="Number of clusters to form.")] = None,
    pass_data: Annotated[
        bool, typer.Option("--pass-data", help="Measure costs with a real forward.")
    ] = False,
    update_frequency: Annotated[int, typer.Option(min=1, help="Micro-batches an update.")] = 1,
) -> None:
    """Show how a model would be split over the nodes, and what to expect. Writes nothing."""
    model, args, kwargs = load_target(target)
    formation = form_clusters(
        model,
        args,
        kwargs,
        nodes=read_node_configs(nodes),
        clusters=clusters,
        pass_data=pass_data,
        update_frequency=update_frequency,
    )
    Console().print(formation.explain(), markup=False, highlight=False, soft_wrap=True)


def load_target(target: str) -> tuple[torch.nn.Module, Sequence[Any], Mapping[str, Any]]:
    """Call ``module:function`` of the current folder; returns model, args and kwargs."""
    made = call_target(target)
    if not isinstance(made, tuple) or not made or not isinstance(made[0], torch.nn.Module):
        kind = type(made).__name__
        raise TargetError(f"{target} must return (model, args) or (model, args, kwargs), got {kind}")
    model, *rest = made
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    for part in rest:
        if isinstance(part, Mapping):
            kwargs = part
        elif isinstance(part, torch.Tensor):
            args = (part,)
        elif isinstance(part, Sequence):
            args = part
        else:
            raise TargetError(f"{target} returns a {type(part).__name__} where example inputs belong")
    return model, args, kwargs
