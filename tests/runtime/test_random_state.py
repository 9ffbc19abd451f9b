"""The random numbers of a worker are its own, or follow from a seed (its actors: tests/e2e/test_random_numbers.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aiodaft._runtime.node.worker_main import part_from_parent, repeat


def draw() -> list[int]:
    return [random.getrandbits(32), int(np.random.randint(1 << 30)), int(torch.randint(1 << 30, ()))]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_a_forked_process_leaves_the_state_of_its_parent() -> None:
    drawn = []
    for _ in range(2):
        np.random.seed(0)
        torch.manual_seed(0)
        part_from_parent()
        drawn.append(draw())
    # Python's own is none of its business.
    assert not set(drawn[0][1:]) & set(drawn[1][1:])


def test_what_follows_from_a_seed_differs_by_actor_and_epoch_and_is_repeatable() -> None:
    who = [(7, "Model-1", 0), (7, "Model-1", 1), (7, "Model-2", 0), (8, "Model-1", 0)]
    found = [(repeat(*one), *draw()) for one in who]
    assert found == [(repeat(*one), *draw()) for one in who]
    assert all(len(set(column)) == len(who) for column in zip(*found, strict=True))
