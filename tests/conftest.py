"""Settings that hold for all tests."""

import logging

import torch

# Torch writes down every capture in detail where logs are caught, and pytest catches them.
logging.getLogger("torch.__trace").disabled = True
torch.set_num_threads(1)
