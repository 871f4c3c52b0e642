"""``ravnest plan``: show a plan without writing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ravnest.cli.console import out, print_json
from ravnest.cli.options import Json
from ravnest.cli.target import TargetError, call_target
from ravnest.formation import NODE_CONFIGS, NODE_DATA, form_clusters
from ravnest.plan.node_configs import read_node_configs


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Function that returns the model and its example inputs: (model, args), "
            "(model, kwargs) or (model, args, kwargs).",
        ),
    ],
    nodes: Annotated[Path, typer.Option(help="Node configurations to plan for.")] = Path(NODE_DATA)
    / NODE_CONFIGS,
    clusters: Annotated[int | None, typer.Option(min=1, help="Number of clusters to form.")] = None,
    pass_data: Annotated[
        bool, typer.Option("--pass-data", help="Measure costs with a real forward pass.")
    ] = False,
    update_frequency: Annotated[int, typer.Option(min=1, help="Micro-batches per update.")] = 1,
    as_json: Json = False,
) -> None:
    """Show how a model would be split over the nodes; write nothing."""
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
    if as_json:
        print_json(formation.plan)
    else:
        out().print(formation.explain())


def load_target(target: str) -> tuple[torch.nn.Module, Sequence[Any], Mapping[str, Any]]:
    """Call ``module:function`` of the current folder and return the model, args and kwargs."""
    result = call_target(target)
    if not isinstance(result, tuple) or not result or not isinstance(result[0], torch.nn.Module):
        kind = type(result).__name__
        raise TargetError(f"{target} must return (model, args) or (model, args, kwargs), got {kind}")
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
