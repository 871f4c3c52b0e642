"""From a model's profile and a list of nodes to a plan: clusters, stages and rings."""
