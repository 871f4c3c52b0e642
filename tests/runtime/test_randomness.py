"""The seed of a micro-batch follows the rule in docs/schedules.md."""

from __future__ import annotations

import hashlib

import torch

from ravnest.runtime.stage.randomness import microbatch_seed, seeded
from ravnest.types import MicrobatchId


def test_the_seed_follows_the_documented_rule() -> None:
    numbers = (42, 3, 17, 2)
    message = b"".join(number.to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(message, digest_size=8).digest()
    seed, phase, index, stage = numbers
    found = microbatch_seed(seed, MicrobatchId(phase, index), stage)
    assert found == int.from_bytes(digest, "little") // 2


def test_micro_batches_phases_and_stages_have_their_own_seeds() -> None:
    found = {
        microbatch_seed(1, MicrobatchId(phase, index), stage)
        for phase in range(3)
        for index in range(4)
        for stage in range(5)
    }
    assert len(found) == 60


def test_a_seeded_forward_leaves_the_generator_of_loaders_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded(9, torch.device("cpu")):
        torch.rand(100)
    assert torch.equal(torch.rand(3), expected)
