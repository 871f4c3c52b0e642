"""Computation of one stage: worker thread, forward and backward passes, updates, weight versions."""
