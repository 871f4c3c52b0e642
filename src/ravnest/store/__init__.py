"""Stages, plans and trained weights on disk."""
