"""Tokens, credentials, certificates and route permissions."""
