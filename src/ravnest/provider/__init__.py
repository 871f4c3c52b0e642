"""Provider: agent and worker processes of a machine that trains for others, and ``launch``."""
