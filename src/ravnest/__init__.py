"""Train PyTorch models that one machine cannot hold, on idle, unequal machines."""
