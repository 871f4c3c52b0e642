"""The generators that loaders use continue where they were."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from ravnest.runtime.random_state import capture_random_state, restore_random_state
from ravnest.store.plain_data import decode, encode


def draw(loaders: list[Any]) -> list[Any]:
    """Draw from everything that a loader may draw from."""
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    return [batches, torch.rand(2).tolist(), random.random(), np.random.rand(), np.random.randn()]


def test_all_generators_are_restored_from_a_file() -> None:
    data = list(range(20))
    own, sampler = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    loaders = [
        DataLoader(data, batch_size=4, shuffle=True, generator=own),
        DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=sampler)),
        DataLoader(data, batch_size=4, shuffle=True),
    ]
    np.random.randn()  # leaves half of a pair behind, which is part of the state
    state = json.loads(json.dumps(encode(capture_random_state(loaders))))
    expected = draw(loaders)
    assert draw(loaders) != expected
    restore_random_state(decode(state), loaders)
    assert draw(loaders) == expected


def test_a_generator_that_two_loaders_share_is_stored_once() -> None:
    generator = torch.Generator().manual_seed(3)
    loaders = [DataLoader([1, 2], shuffle=True, generator=generator) for _ in range(2)]
    assert len(capture_random_state(loaders)["loaders"]) == 1
