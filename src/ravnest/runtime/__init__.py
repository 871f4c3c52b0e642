"""Training: the schedule, the stage's computation, and the nodes and trainers that users know."""
