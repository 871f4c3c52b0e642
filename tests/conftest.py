"""Settings for all tests."""

import logging

import torch

# torch logs every capture in detail when log records are captured, which pytest does.
logging.getLogger("torch.__trace").disabled = True
torch.set_num_threads(1)
