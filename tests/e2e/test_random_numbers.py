"""Actors draw different random numbers, which a runtime with a seed repeats."""

from __future__ import annotations

import os
import random

import pytest
from supervised import AT_ONCE

import aiodaft


class Dice(aiodaft.Actor):
    def __init__(self) -> None:
        self.first = random.getrandbits(40)

    @aiodaft.method
    async def throw(self) -> list[int]:
        return [self.first, random.getrandbits(40)]

    @aiodaft.method
    async def die(self) -> None:
        os._exit(1)

    @aiodaft.method
    async def throw_another(self) -> list[int]:
        async with aiodaft.current_runtime().spawn(Dice) as dice:
            return await dice.throw()


async def thrown(seed: int) -> list[list[int]]:
    """The throws of two members of a group, of an actor that one of them spawns, and of an actor after its restart."""
    async with aiodaft.Runtime(seed=seed, preload=()) as rt, rt.group(2, Dice) as group:
        found = [*await group.all(Dice.throw), await group[0].throw_another()]
        async with rt.on(restart=aiodaft.Restart(backoff=AT_ONCE)).spawn(Dice) as dice:
            found.append(await dice.throw())
            with pytest.raises(aiodaft.ActorDied):
                await dice.die()
            found.append(await dice.throw())
        return found


async def test_a_seed_repeats_what_each_actor_draws() -> None:
    found = await thrown(7)
    assert found == await thrown(7)
    numbers = [number for throws in found for number in throws]
    assert len(set(numbers)) == len(numbers)


def test_a_seed_is_a_number() -> None:
    for wrong in (-1, 1.5, "7", True):
        with pytest.raises(ValueError, match="seed="):
            aiodaft.Runtime(seed=wrong)  # type: ignore[arg-type]
