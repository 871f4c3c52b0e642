"""Relay: nodes that cannot be dialled are reached through it; it forwards encrypted bytes only."""
