"""Reachability of providers: dialling back, relays, and the routes that nodes get."""
