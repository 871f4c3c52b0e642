"""What a requester does: submit a training, follow it, and fetch the trained model."""
