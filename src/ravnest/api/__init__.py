"""What travels over HTTP between the server, providers and requesters."""
