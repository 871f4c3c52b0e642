"""``ravnest plan``: what a plan would look like, without writing anything."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ravnest.errors import RavnestError
from ravnest.formation import NODE_CONFIGS, NODE_DATA, form_clusters
from ravnest.plan.nodes import read_node_configs
from ravnest.split.source import line_of_traceback


class TargetError(RavnestError, ValueError):
    """``module:function`` does not name a function that gives a model and example inputs."""


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
    made = _call(target)
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


def _call(target: str) -> Any:
    """What the user's function returns; what goes wrong in it is the user's to read, with its line."""
    module_name, _, function_name = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise TargetError(f"{target!r} is not of the form module:function")
    sys.path.insert(0, str(Path.cwd()))
    sys.dont_write_bytecode = True  # planning writes nothing, not even beside the user's module
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
        if callable(function):
            return function()
    except ModuleNotFoundError as error:
        raise TargetError(
            f"there is no module {error.name!r} here; run this where it can be imported"
        ) from error
    except Exception as error:  # the user's code may raise anything
        line = line_of_traceback(error.__traceback__)
        raise TargetError(f"{target} fails: {type(error).__name__}: {error}\n{line}".strip()) from error
    raise TargetError(f"the module {module_name} has no function {function_name}")
