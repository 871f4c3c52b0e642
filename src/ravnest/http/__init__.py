"""HTTP client of the server API, used by requesters and providers."""
