"""``ravnest fuse``: trained stages to one state_dict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ravnest.store.trained import model_fusion


def fuse(
    cluster: Annotated[int, typer.Option(min=0, help="The cluster whose stages are fused.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where the trained stages are.")] = Path("trained"),
) -> None:
    """Combine a cluster's trained stages into one state_dict for the original model."""
    typer.echo(f"wrote {model_fusion(cluster, folder=folder)}")
