"""Traces: what each node of a run did when, as a file for Perfetto."""
