"""Fixtures of the transport tests."""

from transport_nodes import authority, kind, network, pair, transport

__all__ = ["authority", "kind", "network", "pair", "transport"]
