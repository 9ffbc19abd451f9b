"""Members of groups that have a plan."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from functools import reduce
from typing import Any

import torch
from torch import Tensor

import aiodaft
from aiodaft import Actor, current_group, method
from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.groups import line
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.groups.line import Line, Planning
from aiodaft._runtime.groups.planned import Planned
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import current_process

OPS: dict[str, Any] = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}


def made(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """The tensor of a rank."""
    numbers = torch.arange(size, dtype=torch.float32) % 7 - 3 + rank / 4
    return numbers.to(dtype)


class Planner(Actor):
    """Carries out what a test asks for."""

    plan: Planned

    @method
    async def open(self, *axes: str) -> None:
        group: aiodaft.typing.CurrentGroup[Planner] = current_group()
        self.plan = await (group.along(*axes) if axes else group).plan()

    @method
    async def live_apart(self) -> None:
        """From now on, this member takes others for those of other hosts."""
        line.can_share_memory = lambda first, second: False

    @method
    def check_in_thread(self, size: int, dtype: torch.dtype, op: Any) -> None:
        """Do each collective in this thread, and compare its result with that of torch."""
        plan, (values, mine, total) = current_group().plan(key="thread").result(), self._values(size, dtype, op)
        rank, count = current_group().rank, len(values)
        _same([plan.all_reduce(mine, op).result()], [total])
        _same([plan.reduce_scatter(mine, op).result()], [total.tensor_split(count)[rank]])
        # The first ranks have all, the last one has nothing.
        chunks = list(mine.split([0] * (count - 1) + [size]))[::-1]
        _same([plan.reduce_scatter(chunks, op).result()], [total if rank == 0 else total[:0]])
        # As DTensor cuts it: the last ranks may have nothing.
        lengths = [len(chunk) for chunk in mine.chunk(count)] + [0] * (count - len(mine.chunk(count)))
        _same([plan.reduce_scatter(mine, op, lengths=lengths).result()], [total.split(lengths)[rank]])
        _same(plan.all_to_all(mine, lengths=lengths).result(), [value.split(lengths)[rank] for value in values])
        _same(plan.all_gather(mine[rank:]).result(), [value[other:] for other, value in enumerate(values)])
        _same(plan.all_to_all(mine).result(), [value.tensor_split(count)[rank] for value in values])
        _same([plan.broadcast(mine if rank == 1 else None, 1).result()], [values[1]])
        started = [plan.all_reduce(mine, op).start(), plan.all_to_all(mine).start(), plan.barrier().start()]
        # Each one completes the one before it.
        _same(started[1].result(), [value.tensor_split(count)[rank] for value in values])
        _same([started[0].result()], [total])
        started[2].result()
        given = size * dtype.itemsize
        assert plan.counts == dict.fromkeys(("all_reduce", "all_gather", "broadcast", "barrier"), 1) | {
            "all_reduce": 2,
            "reduce_scatter": 3,
            "all_to_all": 3,
        }
        assert plan.nbytes["reduce_scatter"] == plan.nbytes["all_to_all"] == 3 * given
        assert plan.nbytes["all_reduce"] == 2 * given
        assert plan.nbytes["broadcast"] == (given if rank == 1 else 0)
        plan.close()

    @method
    async def check_on_loop(self, size: int, dtype: torch.dtype, op: Any) -> None:
        """Do each collective in a task, with results in given tensors."""
        plan, (values, mine, total) = await current_group().plan(), self._values(size, dtype, op)
        rank, count = current_group().rank, len(values)
        into = mine.clone()
        assert await plan.all_reduce(into, op, out=into) is into
        _same([into], [total])
        gathered = torch.empty(count, size * 2, dtype=dtype)
        # Not without gaps.
        await plan.all_gather(mine, out=list(gathered[:, ::2]))
        _same(list(gathered[:, ::2]), values)
        part = total.tensor_split(count)[rank].clone()
        _same([await plan.reduce_scatter(mine, op, out=torch.empty_like(part))], [part])
        parts = [torch.empty_like(value.tensor_split(count)[rank]) for value in values]
        await plan.all_to_all(mine, out=parts)
        _same(parts, [value.tensor_split(count)[rank] for value in values])
        into = torch.empty_like(mine)
        _same([await plan.broadcast(mine, 0, out=into)], [values[0]])
        await plan.barrier()

    def _values(self, size: int, dtype: torch.dtype, op: str) -> tuple[list[Tensor], Tensor, Tensor]:
        values = [made(rank, size, dtype) for rank in range(current_group().size)]
        return values, values[current_group().rank], reduce(OPS[op], values)

    @method
    def reduce_along_each(self, *axes: str) -> list[tuple[float, int, int]]:
        """Of each axis: the sum of the ranks along it, and the collectives and bytes of its plan."""
        group = current_group()
        plans, rank = [group.along(axis).plan().result() for axis in axes], torch.tensor(float(group.rank))
        exchanges = [plan.all_reduce(rank).start() for plan in plans]
        sums = [exchange.result().item() for exchange in reversed(exchanges)][::-1]
        found = [(total, plan.counts.total(), plan.nbytes.total()) for total, plan in zip(sums, plans, strict=True)]
        for plan in plans:
            plan.close()
        return found

    @method
    async def count_signals(self) -> None:
        """As on a processor on which other ones see writes out of order."""
        line.ORDERED = False  # type: ignore[misc]

    @method
    def reduce(self, tensor: Any, op: Any = "sum", repeat: int = 1, out: Any = None) -> Any:
        """Combine in a thread, again and again."""
        return [self.plan.all_reduce(tensor, op, out=out).result() for _ in range(repeat)][-1]

    @method
    def scatter(self, tensor: Tensor, lengths: list[int]) -> Tensor:
        return self.plan.reduce_scatter(tensor, lengths=lengths).result()

    @method
    async def reduce_on_loop(self, tensor: Any, op: Any = "sum") -> Any:
        return await self.plan.all_reduce(tensor, op)

    @method
    async def gather_into_conjugates(self) -> list[complex]:
        out = [torch.empty(1, dtype=torch.complex64).conj() for _ in range(2)]
        await self.plan.all_gather(torch.tensor([current_group().rank + 1j]), out=out)
        return [one.item() for one in out]

    @method
    async def exchange_columns(self) -> list[list[float]]:
        """Columns of a matrix: each a row with gaps in memory."""
        columns = torch.arange(6.0).view(3, 2).split(1, 1)
        gathered = await self.plan.all_gather(columns[1])
        exchanged = await self.plan.all_to_all(columns)
        combined = await self.plan.reduce_scatter(columns)
        return [one.flatten().tolist() for one in (*gathered, *exchanged, combined)]

    @method
    async def await_twice(self) -> bool:
        exchange = self.plan.all_reduce(torch.ones(1))
        return await exchange is await exchange

    @method
    def reduce_on_another_loop(self) -> None:
        asyncio.run(_awaited(self.plan.all_reduce(torch.ones(1))))

    @method
    async def cancel_when_descriptors_came(self) -> None:
        """Rank 1 gives up when it has descriptors, and does not know that these are all."""
        task, part, rank = asyncio.current_task(), current_process().part(Planning), current_group().rank
        came = part.descriptors_came

        def come(*note: Any) -> None:
            came(*note)
            if rank == 1 and task is not None:
                task.cancel()

        part.descriptors_came = come  # type: ignore[method-assign]
        await current_group().plan()

    @method
    async def at_once(self, count: int) -> list[float]:
        """Many tasks use the plan."""
        found = await asyncio.gather(*(_awaited(self.plan.all_reduce(torch.tensor(turn))) for turn in range(count)))
        return [one.item() for one in found]

    @method
    def reduce_late(self, size: int) -> None:
        """Rank 1 asks for the result when it knows that the call of rank 0 has failed."""
        exchange, call, told = self.plan.all_reduce(torch.ones(size)).start(), current_call.get(), threading.Event()
        assert call is not None
        with current_process().part(Keyed).ending(call, lambda _: told.set()):
            if current_group().rank == 1:
                told.wait()
            exchange.result()

    @method
    def reduce_unless(self, fails: bool) -> float:
        if fails:
            raise ValueError("a bad batch")
        return self.plan.all_reduce(torch.ones(1)).result().item()

    @method
    async def leave(self) -> None:
        """Stop waiting, and go on."""
        try:
            async with asyncio.timeout(0):
                await self.plan.all_reduce(torch.ones(1))
        except TimeoutError:
            return

    @method
    def block_the_loop(self) -> Any:
        return current_process().on_loop(lambda: self.plan.all_reduce(torch.ones(1)).result())

    @method
    def die_at(self, place: str, turn: int, size: int) -> None:
        """Die in an exchange: in place of a step of it."""
        turns = iter(range(turn, -1, -1))
        before = getattr(Line, place)

        def die(*args: Any) -> Any:
            if next(turns) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return before(*args)

        setattr(Line, place, die)
        self.plan.all_reduce(torch.ones(size)).result()

    @method
    def sent_meanwhile(self, size: int, repeat: int) -> int:
        """The fewest messages of this process while it exchanges: at first it hears of what was before."""
        connections, counts, tensor = current_process().part(Peer).connections, list[int](), torch.ones(size)
        for _ in range(9):
            before = connections.traffic()
            for _ in range(repeat):
                self.plan.all_reduce(tensor, out=tensor).result()
            after = connections.traffic()
            sent = after.control_sent + after.payload_sent - before.control_sent - before.payload_sent
            counts.append(sent + after.control_received - before.control_received)
        return min(counts)

    @method
    async def close(self) -> None:
        self.plan.close()

    @method
    async def forget(self) -> None:
        del self.plan

    @method
    async def left(self) -> tuple[int, int]:
        """The lines of this process, and the descriptors of their memory."""
        await asyncio.sleep(0)
        lines = 0
        for fd in os.listdir("/proc/self/fd"):
            # That of the list itself is closed.
            with suppress(OSError):
                lines += "aiodaft-line" in os.readlink(f"/proc/self/fd/{fd}")
        return len(current_process().part(Planning)), lines


async def _awaited(exchange: Any) -> Any:
    return await exchange


def _same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [tuple(one.shape) for one in found] == [tuple(one.shape) for one in expected]
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, expected, strict=True))
