"""Requester side: submit a job, follow it and fetch the trained model."""
