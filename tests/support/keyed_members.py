"""Members of groups that carry out collectives in their methods."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from collective_actors import made
from torch import Tensor

import aiodaft
from aiodaft import Actor, CurrentGroup, Ref, method
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import current_process

# What a random program does: a key, the axes of the part of the group, and the operation.
Round = tuple[int, str, str]


class Keyer(Actor):
    """Carries out what a test asks for."""

    def __init__(self) -> None:
        self.early = aiodaft.current_group()
        self.waits: dict[Any, Ref[Any]] = {}

    @property
    def group(self) -> CurrentGroup[Any]:
        return aiodaft.current_group()

    @method
    async def do(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out a collective."""
        return await getattr(self.group, operation)(*args, **options)

    @method
    def do_in_thread(self, operation: str, *args: Any, **options: Any) -> Any:
        return getattr(self.group, operation)(*args, **options).result()

    @method
    async def do_early(self, operation: str) -> None:
        """The same, in the group as it was for the constructor."""
        await getattr(self.early, operation)()

    @method
    async def on_tensor(self, operation: str, shape: tuple[int, ...], **options: Any) -> Any:
        return await getattr(self.group, operation)(made(self.group.rank, *shape), **options)

    @method
    async def begin(self, operation: str, *args: Any, key: Any = None) -> None:
        """Take part, and do not wait."""
        self.waits[key] = getattr(self.group, operation)(*args, key=key)

    @method
    async def finish(self, key: Any = None) -> Any:
        return await self.waits.pop(key)

    @method
    async def give_up(self, key: Any = None) -> None:
        """Cancel the wait for what has begun."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await self.waits.pop(key)
                raise AssertionError

    @method
    async def write_after(self, size: int) -> float:
        """Write to a value as soon as the result is there; the sum of what the next member gave."""
        value = torch.ones(size)
        parts = await self.group.all_gather(value, key="written")
        value.zero_()
        return float(parts[(self.group.rank + 1) % self.group.size].sum())

    @method
    async def several(self, calls: Sequence[tuple[Any, Any]], at_once: bool) -> list[Any]:
        """Gather several values, each with a key: at the same time, or one after the other."""
        if at_once:
            return list(await asyncio.gather(*(self.group.all_gather(value, key=key) for key, value in calls)))
        return [await self.group.all_gather(value, key=key) for key, value in calls]

    @method
    async def gather_lock(self, key: Any) -> None:
        """Take part with what cannot travel."""
        await self.group.all_gather(threading.Lock(), key=key)

    @method
    async def along(self, axis: str, key: Any) -> list[int]:
        """The ranks in the whole group of the members of a part of it."""
        return await self.group.along(axis).all_gather(self.group.rank, key=key)

    @method
    async def rounds(self, count: int, size: int) -> float:
        """Several rounds with one key, one after the other."""
        total, value = 0.0, torch.ones(size)
        for _ in range(count):
            total += float((await self.group.all_reduce(value, key="round"))[0])
        return total

    @method
    async def program(self, rounds: Sequence[Round], seed: int) -> list[int]:
        """All rounds in an order of its own, a few at a time; the results in the order of rounds."""
        source = random.Random(seed)
        order = source.sample(range(len(rounds)), len(rounds))
        found: dict[int, Any] = {}

        async def one(number: int) -> None:
            key, axis, operation = rounds[number]
            group = self.group if axis == "all" else self.group.along(axis)
            value = (key * 7 + self.group.rank * 3) % 101
            found[number] = await getattr(group, operation)(value, key=(key, "random"))

        # All at once: members that wait for each other in opposite orders need what the others do later.
        await asyncio.gather(*map(one, order))
        return [found[number] for number in range(len(rounds))]

    @method
    async def meetings(self) -> int:
        """Meetings at this member that are not over."""
        return keyed().meetings

    @method
    async def left(self) -> tuple[int, int, int]:
        """What collectives have left here: meetings, stored values, refs."""
        peer = current_process().part(Peer)
        refs = len(peer.objects.borrowing.borrowed) + peer.refs.are_lent
        return keyed().meetings, len(peer.store.entries), refs

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def keyed() -> Keyed:
    return current_process().part(Keyed)


def expected(rounds: Sequence[Round], rank: int, sizes: dict[str, int]) -> list[int]:
    """The results of `program` at a rank of a group with these axes."""
    count, inner = sizes["a"] * sizes["b"], sizes["b"]
    parts = {
        "all": range(count),
        "a": range(rank % inner, count, inner),
        "b": range(rank - rank % inner, rank - rank % inner + inner),
    }
    results: list[int] = []
    for key, axis, operation in rounds:
        values = [(key * 7 + member * 3) % 101 for member in parts[axis]]
        results.append({"all_reduce": sum(values), "broadcast": values[0], "all_gather": values}[operation])  # type: ignore[arg-type]  # a list as well
    return results


__all__ = ["Keyer", "Round", "Tensor", "expected"]
