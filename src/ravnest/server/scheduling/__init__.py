"""Job queue, matching with providers, planning and shipping."""
