"""Routes of the HTTP API, one module per subject: they check permissions and call the services."""
