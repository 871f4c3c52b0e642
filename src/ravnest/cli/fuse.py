"""``ravnest fuse``: fuse trained stages into one state_dict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ravnest.store.trained import model_fusion


def fuse(
    cluster: Annotated[int, typer.Option(min=0, help="Cluster whose stages are fused.")] = 0,
    folder: Annotated[Path, typer.Option(help="Folder of the trained stages.")] = Path("trained"),
) -> None:
    """Fuse a cluster's trained stages into one state_dict."""
    typer.echo(f"wrote {model_fusion(cluster, folder=folder)}")
