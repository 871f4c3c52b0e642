"""HTTP application: middleware, routes, TLS listener and server runner."""
