"""Addresses that the server may dial for a provider. Pure.

A provider must not be able to make the server connect to hosts that the provider cannot reach itself:
services of the server's own machine, hosts of its local network, metadata services of a cloud.
"""

from __future__ import annotations

import ipaddress

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16")
)
"""Services that give a cloud machine its credentials; only some of them are link-local."""
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")))
"""IPv6 addresses that gateways translate to IPv4 addresses, which can be private ones."""


def parse_ip(text: str) -> Ip | None:
    """Return an IP address, an IPv4-mapped one as IPv4; ``None`` if the text is a name."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped


def dial_refusal(target: Ip, source: Ip | None, own: frozenset[Ip]) -> str | None:
    """Return why the server does not dial ``target`` for a request from ``source``; ``None`` if it does.

    ``own`` are the addresses of the server's machine.
    """
    if source is None:
        return "the server does not know where the request comes from"
    if target.is_unspecified or target.is_multicast or target.is_link_local or target in _METADATA:
        return "not an address at which other machines reach a provider"
    if target.is_loopback:
        return None if source.is_loopback else "a loopback address of the provider's own machine"
    if target == source:
        return None
    if target in own:
        here = source.is_loopback or source in own
        return None if here else "an address of the server's machine, not of the provider's"
    if isinstance(target, ipaddress.IPv6Address) and any(target in net for net in _TRANSLATED):
        return "a translated address, which the server does not dial"
    if not target.is_global and source.is_global:
        return "a private address, which the server does not dial for a provider on the internet"
    return None
