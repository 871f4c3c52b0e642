"""Links between nodes: TCP connections with TLS, an in-memory implementation, and certificates."""
