"""Messages between nodes, as values and as bytes."""
