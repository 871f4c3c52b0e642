"""One seed for every source of random numbers that training uses."""

from __future__ import annotations

import random

import numpy as np
import torch


def set_seed(seed: int = 42) -> None:
    """Seed Python's ``random``, numpy and torch, on all CUDA devices where there are any.

    Providers of one cluster must use the same seed, so that Root and Leaf see the same data order.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ValueError(f"the seed must be a whole number from 0 to 2**32 - 1, not {seed!r}")
    random.seed(seed)
    np.random.seed(seed)  # user code draws from the global generator
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
