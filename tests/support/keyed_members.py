"""Members of groups that carry out collectives in their methods."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from collective_actors import made
from torch import Tensor

import aiodaft
from aiodaft import Actor, Ref, method
from aiodaft._runtime.groups import keyed as keyed_module
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import current_process
from aiodaft.typing import CurrentGroup

# One step of a random program: a key, the axes of the part of the group, and the operation.
Round = tuple[int, str, str]


class Unsaid(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Shapeless(Tensor):
    """A tensor that does not say what has to be the same for all members."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        raise RuntimeError("no shape")


class Keyer(Actor):
    """Carries out the requests of a test."""

    def __init__(self) -> None:
        self.early = aiodaft.current_group()
        self.waits: dict[Any, Ref[Any]] = {}

    @property
    def group(self) -> CurrentGroup[Any]:
        return aiodaft.current_group()

    @method
    async def handle(self, value: Any) -> Any:
        """Exchange a value with the other of two members; an attribute of services has the same name."""
        await self.group.send(value, to=1 - self.group.rank)
        return await self.group.recv()

    @method
    async def do(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out a collective."""
        return await getattr(self.group, operation)(*args, **options)

    @method
    def do_in_thread(self, operation: str, *args: Any, **options: Any) -> Any:
        return getattr(self.group, operation)(*args, **options).result()

    @method
    def do_beside(self, operation: str, *args: Any, **options: Any) -> Any:
        """In a thread that knows of no call."""
        group, results = self.group, list[Any]()
        thread = threading.Thread(target=lambda: results.append(getattr(group, operation)(*args, **options).result()))
        thread.start()
        thread.join()
        return results[0]

    @method
    async def do_in_part(self, parts: list[list[int]], operation: str, *args: Any, **options: Any) -> Any:
        """In the part that some ranks give, and of that other ranks, and so on; its id comes, too."""
        group = self.group
        for ranks in parts:
            group = group.part(ranks)
        return group.id.partition("/")[2], group.rank, await getattr(group, operation)(*args, **options)

    @method
    async def do_into(self, operation: str, value: Any, out: Any, **options: Any) -> tuple[bool, Any]:
        """Whether the result is where it was to be written, and what is there."""
        result = await getattr(self.group, operation)(value, out=out, **options)
        return result is out, out

    @method
    async def sum_into(self, value: Tensor) -> tuple[bool, Tensor]:
        """The same, where its value is."""
        return await self.group.all_reduce(value, out=value) is value, value

    @method
    async def on_lengths(self, lengths: list[int]) -> Tensor:
        """Reduce and scatter seven rows."""
        return await self.group.reduce_scatter(made(self.group.rank, 7, 2), lengths=lengths)

    @method
    async def do_early(self, operation: str) -> None:
        """The same, in the group as it was for the constructor."""
        await getattr(self.early, operation)()

    @method
    async def on_tensor(self, operation: str, shape: tuple[int, ...], **options: Any) -> Any:
        return await getattr(self.group, operation)(made(self.group.rank, *shape), **options)

    @method
    async def gather_unless(self, fails: str) -> list[str]:
        """Gather the values of the members by two keys; or fail before, or between them."""
        if fails == "before":
            raise ValueError("a bad batch")
        early = self.group.all_gather(fails, key="early")
        if fails == "between":
            raise ValueError("a bad batch")
        if fails == "without a text":
            raise Unsaid
        return [*await early, *await self.group.all_gather(fails, key="late")]

    @method
    async def gather_after_death(self, dies: bool) -> list[int]:
        """Die; or gather in the group that is left after that."""
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        group = await self.group.changed()
        return await group.all_gather(group.rank, key="after")

    @method
    async def count(self, *values: Any) -> int:
        return len(values)

    @method
    def gather_in_thread_unless(self, fails: str, timeout: float | None) -> list[str]:
        if fails:
            raise ValueError("a bad batch")
        return self.group.all_gather(fails, key="thread", timeout=timeout).result()

    @method
    async def begin(self, operation: str, *args: Any, key: Any = None) -> None:
        """Take part, and do not wait."""
        self.waits[key] = getattr(self.group, operation)(*args, key=key)

    @method
    async def finish(self, key: Any = None) -> Any:
        return await self.waits.pop(key)

    @method
    async def until_done(self, keys: Iterable[int], turn: int, rank: int) -> list[list[tuple[int, int]]]:
        """Gather by all keys at the same time; again, with all of them, after each change."""
        while True:
            refs = [self.group.all_gather((turn, rank), key=key) for key in keys]
            found = await asyncio.gather(*refs, return_exceptions=True)
            if not any(isinstance(one, BaseException) for one in found):
                return cast("list[list[tuple[int, int]]]", found)

    @method
    async def receive_number(self) -> int:
        return int(await self.group.recv())

    @method
    async def begin_late(self, key: Any) -> None:
        """Take part with a number that is to be received, then with one that is here."""
        late = self.group.members[self.group.rank].receive_number()
        self.waits["late"] = self.group.all_gather(late, key=key)
        self.waits["next"] = self.group.all_gather(2, key=key)

    @method
    async def give_up(self, key: Any = None) -> None:
        """Cancel the wait for a collective that has begun."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await self.waits.pop(key)
                raise AssertionError

    @method
    async def freeze_other(self, pid: int, key: Any) -> Any:
        """Take part while the member where all meet is stopped, without the time that it has besides the timeout."""
        usual, keyed_module.GRACE = keyed_module.GRACE, 0.0
        os.kill(pid, signal.SIGSTOP)
        try:
            return await self.group.barrier(key=key, timeout=0.05)
        finally:
            os.kill(pid, signal.SIGCONT)
            keyed_module.GRACE = usual

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def write_after(self, size: int) -> float:
        """Write to a value as soon as the result is there; the sum of the next member's value."""
        value = torch.full((size,), 1.0 + self.group.rank)
        parts = await self.group.all_gather(value, key="written")
        value.zero_()
        return float(parts[(self.group.rank + 1) % self.group.size].sum())

    @method
    async def write_to_result(self, operation: str, size: int, writer: int) -> set[float]:
        """One member writes to its result, and to its value, before the others have looked at theirs."""
        value = torch.full((size,), 1.0 + self.group.rank)
        give = operation != "broadcast" or self.group.rank == 0
        result = await getattr(self.group, operation)(*([value] if give else []))
        parts = result if isinstance(result, list) else [result]
        await self.group.barrier()
        if self.group.rank == writer:
            for part in parts:
                part.add_(100)
            value.add_(1000)
        await self.group.barrier()
        return {float(part[at]) for part in parts if part is not value for at in (0, -1)}

    @method
    def write_after_reduce(self, size: int) -> list[float]:
        """Write to a value as soon as the wait is over; the elements of the result, each once."""
        value = torch.full((size,), float(self.group.rank))
        total = self.group.reduce(value).result()
        value.fill_(-1)
        return [] if total is None else total.unique().tolist()

    @method
    async def several(self, calls: Sequence[tuple[Any, Any]], at_once: bool) -> list[Any]:
        """Gather several values, each with a key: at the same time, or one after the other."""
        if at_once:
            return list(await asyncio.gather(*(self.group.all_gather(value, key=key) for key, value in calls)))
        return [await self.group.all_gather(value, key=key) for key, value in calls]

    @method
    async def gather_lock(self, key: Any) -> None:
        """Take part with a value that cannot travel."""
        await self.group.all_gather(threading.Lock(), key=key)

    @method
    async def fail(self) -> float:
        raise KeyError("value")

    @method
    async def reduce_failed_call(self, key: Any) -> None:
        """Take part with the result of a call that fails."""
        await self.group.all_reduce(self.group.members[self.group.rank].fail(), key=key)

    @method
    async def reduce_shapeless(self, key: Any) -> None:
        await self.group.all_reduce(torch.eye(2).as_subclass(Shapeless), key=key)

    @method
    async def reduce_by_lock(self, key: Any) -> None:
        """Take part with an op that cannot travel."""
        lock = threading.Lock()

        def add(one: Any, other: Any) -> Any:
            with lock:
                return one + other

        await self.group.all_reduce(1, add, key=key)

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
    async def all_reduce_in_order(self, values: Sequence[tuple[str, float]]) -> dict[str, float]:
        """Call one after the other, then wait."""
        refs = {name: self.group.all_reduce(value, key=name) for name, value in values}
        return {name: await ref for name, ref in refs.items()}

    @method
    async def program(self, rounds: Sequence[Round], order: Sequence[int]) -> list[Any]:
        """Call the rounds in an order of its own, then wait; the results in the order of the rounds."""
        refs: dict[int, Ref[Any]] = {}
        for number in order:
            key, axis, operation = rounds[number]
            group = self.group if axis == "all" else self.group.along(axis)
            refs[number] = getattr(group, operation)(value_of(key, self.group.rank), key=key)
        return [await refs[number] for number in range(len(rounds))]

    @method
    async def swap(self, value: Tensor, tag: str = "") -> Any:
        """Send first, then receive."""
        other = 1 - self.group.rank
        await self.group.send(value + self.group.rank, to=other, tag=tag)
        return await self.group.recv(source=other, tag=tag)

    @method
    async def send(self, value: Any, to: int) -> None:
        await self.group.send(value, to=to)

    @method
    async def receive(self, source: int) -> Any:
        return await self.group.recv(source=source)

    @method
    async def send_first(self, value: Tensor, sent: str, received: str) -> Any:
        other = 1 - self.group.rank
        await self.group.send(value, to=other, tag=sent)
        return await self.group.recv(source=other, tag=received)

    @method
    async def meetings(self) -> int:
        """Meetings at this member that are not over."""
        return keyed().meetings

    @method
    async def left(self) -> tuple[int, int, int]:
        """The objects that collectives have left here: meetings, stored values, refs."""
        peer = current_process().part(Peer)
        refs = len(peer.objects.borrowing.borrowed) + peer.refs.are_lent
        return keyed().meetings, len(peer.store.entries), refs

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def keyed() -> Keyed:
    return current_process().part(Keyed)


def value_of(key: int, rank: int) -> int:
    """The value of a member in a round of a random program."""
    return (key * 7 + rank * 3) % 101


def shuffled(rounds: Sequence[Round], source: random.Random) -> list[int]:
    """An order of rounds. Those with one key and one part of the group stay in theirs: they are counted."""
    waiting: dict[tuple[int, str], deque[int]] = {}
    for number, (key, axis, _) in enumerate(rounds):
        waiting.setdefault((key, axis), deque()).append(number)
    return [waiting[rounds[number][:2]].popleft() for number in source.sample(range(len(rounds)), len(rounds))]


def expected(rounds: Sequence[Round], rank: int, sizes: Mapping[str, int]) -> list[Any]:
    """The results of `program` at a rank of a group with the axes a and b."""
    inner, column, row = sizes["b"], rank % sizes["b"], rank - rank % sizes["b"]
    count = sizes["a"] * inner
    parts = {"all": range(count), "a": range(column, count, inner), "b": range(row, row + inner)}
    results: list[Any] = []
    for key, axis, operation in rounds:
        values = [value_of(key, member) for member in parts[axis]]
        results.append({"all_reduce": sum(values), "broadcast": values[0], "all_gather": values}[operation])
    return results
