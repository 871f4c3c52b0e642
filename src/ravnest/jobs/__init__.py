"""A training as data: the model, its loss and its samples, without any of the requester's code."""
