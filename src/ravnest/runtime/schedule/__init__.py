"""The pipeline schedule: a pure state machine, its simulator and the choice of the window."""
