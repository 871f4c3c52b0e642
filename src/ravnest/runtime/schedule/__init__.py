"""The pipeline schedule: a pure state machine and its simulator."""
