"""Settings that hold for all tests."""

import logging

import torch

logging.getLogger("torch.__trace").disabled = True  # torch writes down every capture where logs are caught
torch.set_num_threads(1)
