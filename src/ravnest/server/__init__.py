"""The intermediary server: matches jobs and providers, plans, ships, and keeps what happened."""
