"""The intermediary server: queues and plans jobs, ships stages and data, stores records and results."""
