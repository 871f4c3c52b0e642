"""Talking to an intermediary server: requests, joining, and files."""
