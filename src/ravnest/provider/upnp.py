"""Routers that map ports by UPnP (Internet Gateway Device), through ``async-upnp-client``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from async_upnp_client.aiohttp import AiohttpRequester
from async_upnp_client.client import UpnpService
from async_upnp_client.client_factory import UpnpFactory
from async_upnp_client.exceptions import UpnpActionError, UpnpError
from async_upnp_client.profiles.igd import IgdDevice

from ravnest.deadlines import PORT_ANSWER, PORT_SEARCH
from ravnest.provider.port_mapping import GatewayError
from ravnest.types import Address

_SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
_DESCRIPTION = "Ravnest provider"
T = TypeVar("T")


class UpnpGateway:
    """Router that was found by UPnP."""

    def __init__(self, service: UpnpService) -> None:
        self._service = service

    def external_host(self) -> str:
        """Return the router's public address."""
        return str(self._call("GetExternalIPAddress").get("NewExternalIPAddress") or "")

    def add(self, external_port: int, internal: Address, lease: float) -> None:
        """Forward a port to ``internal`` for ``lease`` seconds (0: for ever), or renew that."""
        self._call(
            "AddPortMapping",
            NewRemoteHost="",
            NewExternalPort=external_port,
            NewProtocol="TCP",
            NewInternalPort=internal.port,
            NewInternalClient=internal.host,
            NewEnabled=True,
            NewPortMappingDescription=_DESCRIPTION,
            NewLeaseDuration=int(lease),
        )

    def remove(self, external_port: int) -> None:
        """Forward the port no longer."""
        self._call(
            "DeletePortMapping", NewRemoteHost="", NewExternalPort=external_port, NewProtocol="TCP"
        )

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        if not self._service.has_action(name):
            raise GatewayError(f"it does not know the action {name}")
        return dict(_run(self._service.action(name).async_call(**arguments)))


def find_gateway(internal: Address) -> UpnpGateway:
    """Search the network of ``internal`` for a router; raise ``GatewayError`` if there is none."""
    if ":" in internal.host:
        raise GatewayError("UPnP maps ports of IPv4 addresses only")
    locations = _run(_search(internal.host))
    if not locations:
        raise GatewayError("none answered a UPnP search; UPnP may be switched off in its settings")
    failure: GatewayError | None = None
    for location in locations:
        try:
            service = _run(_connect(location))
        except GatewayError as error:
            failure = error
            continue
        if service is not None:
            return UpnpGateway(service)
    raise failure or GatewayError("it offers no mapping of ports")


async def _search(host: str) -> list[str]:
    """Return where the routers that answered describe themselves."""
    answers = await IgdDevice.async_search(source=(host, 0), timeout=PORT_SEARCH)
    found = sorted({(str(answer["location"]), str(answer["_host"])) for answer in answers})
    # A device must not send this machine to another one.
    return [location for location, sender in found if urlsplit(location).hostname == sender]


async def _connect(location: str) -> UpnpService | None:
    factory = UpnpFactory(AiohttpRequester(timeout=int(PORT_ANSWER)), non_strict=True)
    device = await factory.async_create_device(location)
    services = {service.service_type: service for service in device.all_services}
    return next((services[name] for name in _SERVICES if name in services), None)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except UpnpActionError as error:
        code = None if error.error_code is None else int(error.error_code)
        raise GatewayError(f"{error.error_desc or error} (UPnP error {code})", code) from error
    except (UpnpError, OSError, TimeoutError) as error:
        raise GatewayError(str(error) or type(error).__name__) from error
