"""``ravnest nodes``: the providers of a server, and a ``node_configs.json`` of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ravnest.cli.console import out, print_json
from ravnest.cli.options import Json, Server, Token
from ravnest.client.server_selection import MAY_LOOK, choose
from ravnest.errors import NodeConfigError
from ravnest.schemas.providers import ProviderState, ProviderView
from ravnest.store.files import write_json

_DEFAULT = Path("node_data/node_configs.json")


def nodes(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[PATH]", help=f"Where --write writes; {_DEFAULT} by default."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write a node_configs.json of the providers that are there.")
    ] = False,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show the providers of a server, or write them down for `clusterize`."""
    if path is not None and not write:
        raise typer.BadParameter("a PATH is for --write only", param_hint="PATH")
    with choose(server, token, MAY_LOOK).api() as api:
        providers = api.get("/api/providers", list[ProviderView])
    if write:
        write_json(path or _DEFAULT, node_configs(providers))
    if as_json:
        print_json(providers)
    elif write:
        out().print(f"wrote {path or _DEFAULT}")
    else:
        _show(providers)


def node_configs(providers: Iterable[ProviderView]) -> dict[str, Any]:
    """The file for ``clusterize``: one entry for each provider that is there."""
    there = [one.offer for one in providers if one.state is not ProviderState.LOST]
    if not there:
        raise NodeConfigError("no provider is there to be written; `ravnest provide` brings one")
    return {
        str(number): {
            "IP": offer.address,
            "benchmarks": {
                "ram": offer.ram,
                "bandwidth": offer.bandwidth,
                "compute": offer.compute,
            },
        }
        for number, offer in enumerate(there)
    }


def _show(providers: list[ProviderView]) -> None:
    if not providers:
        out().print("no providers; `ravnest provide --server URL --token TOKEN` makes a machine one")
        return
    table = Table("PROVIDER", "STATE", "JOB", "RAM", "CORES", "GFLOP/S", "MBIT/S", "WHY", box=None)
    for one in providers:
        offer = one.offer
        table.add_row(
            f"{offer.name} ({one.id})",
            one.state,
            one.job or "-",
            f"{offer.ram:.1f} GB",
            str(offer.cores),
            f"{offer.compute:.0f}",
            f"{offer.bandwidth:.0f}",
            one.reason,
        )
    out().print(table)
