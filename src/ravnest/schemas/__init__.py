"""Messages of the HTTP API."""
