"""``ravnest nodes``: the providers of a server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ravnest.cli.console import out, print_json, print_table
from ravnest.cli.options import Json, Server, Token
from ravnest.client.server_selection import READ_ROLES, select_server
from ravnest.errors import NodeConfigError
from ravnest.schemas.providers import ProviderState, ProviderView
from ravnest.store.files import write_json

_DEFAULT = Path("node_data/node_configs.json")


def nodes(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[PATH]", help=f"File for --write; default {_DEFAULT}."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the connected providers to a node_configs.json.")
    ] = False,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show the providers of a server, or write a `node_configs.json`."""
    if path is not None and not write:
        raise typer.BadParameter("PATH needs --write", param_hint="PATH")
    with select_server(server, token, READ_ROLES).api() as api:
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
    """Return the content of a ``node_configs.json`` with one entry per connected provider."""
    offers = [one.offer for one in providers if one.state is not ProviderState.LOST]
    if not offers:
        raise NodeConfigError(
            "the server has no connected provider to write; start one with `ravnest provide --server "
            "URL --token TOKEN`"
        )
    return {
        str(number): {
            "IP": offer.address,
            "benchmarks": {
                "ram": offer.ram,
                "bandwidth": offer.bandwidth,
                "compute": offer.compute,
            },
        }
        for number, offer in enumerate(offers)
    }


def _show(providers: list[ProviderView]) -> None:
    if not providers:
        out().print("no providers; add one with `ravnest provide --server URL --token TOKEN`")
        return
    columns = ("PROVIDER", "STATE", "REACHED", "JOB", "RAM", "CORES", "GFLOP/S", "MBIT/S", "SANDBOX")
    table = Table(*columns, "REASON", box=None)
    for one in providers:
        offer = one.offer
        table.add_row(
            f"{offer.name} ({one.id})",
            one.state,
            one.reachability,
            one.job or "-",
            f"{offer.ram:.1f} GB",
            str(offer.cores),
            f"{offer.compute:.0f}",
            f"{offer.bandwidth:.0f}",
            offer.sandbox or "-",
            one.reason,
        )
    print_table(table)
    for one in providers:
        if one.reachability != "direct" and one.state is not ProviderState.LOST:
            out().print(f"{one.offer.name} is {one.reachability}: {one.reachability_reason}")
