"""Routes of the HTTP API, by subject; thin: they check who asks, and call the server."""
