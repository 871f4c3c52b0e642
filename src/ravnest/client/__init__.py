"""The requester's side: submit a job, follow it and fetch the trained model."""
