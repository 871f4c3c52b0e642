"""Typed messages of the HTTP API."""
