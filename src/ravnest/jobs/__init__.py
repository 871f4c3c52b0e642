"""A job as data: model, loss and samples in files and messages, without any of the requester's code."""
