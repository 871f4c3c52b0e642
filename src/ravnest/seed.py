"""Common seed of all random number generators that training uses."""

from __future__ import annotations

import random

import numpy as np
import torch


def set_seed(seed: int = 42) -> None:
    """Seed Python's ``random``, numpy and torch, including all CUDA devices.

    All nodes of a cluster must use the same seed, so that Root and Leaf see the data in the same order.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ValueError(f"the seed must be a whole number from 0 to 2**32 - 1, not {seed!r}")
    random.seed(seed)
    np.random.seed(seed)  # user code uses the global generator
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
