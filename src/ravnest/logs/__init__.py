"""Logs of a run: figures as CSV and for TensorBoard, records as JSON lines, calls of the user's code."""
