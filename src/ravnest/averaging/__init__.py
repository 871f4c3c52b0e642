"""Clusters learn together: rounds that average their parameters over the plan's rings."""
