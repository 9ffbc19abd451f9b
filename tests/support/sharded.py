"""Actors with shards of tensors, which look at the moves of these; and the common part of tests of that."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from here import copied_bytes, current_peer
from host_devices import use_host_devices
from torch import Tensor

import aiodaft
from aiodaft import Actor, Group, Refs, method
from aiodaft._protocol.ids import RESHARDING
from aiodaft._runtime.groups.resharding import Resharding
from aiodaft._runtime.objects.store import InPlace
from aiodaft.resharding import Layout, Sharding
from aiodaft_transport import Block, Control, Grant
from aiodaft_transport.shm import ShmTransport
from aiodaft_transport.tcp import TcpTransport

State: TypeAlias = dict[str, Tensor]
# Copies a parcel of so many bytes.
Copy: TypeAlias = Callable[[Callable[[], object], int], Awaitable[None]]


async def _nothing(job: Callable[[], object], nbytes: int) -> None:
    """In place of a copy."""


def resharding() -> Resharding:
    found = current_peer().actors[RESHARDING].instance
    assert isinstance(found, Resharding)
    return found


class Rank(Actor):
    """One rank with its shard."""

    def __init__(self) -> None:
        self.state: State = {}
        self._copied = 0
        self._decoded = 0
        self._asked = asyncio.Event()
        self._go_on = asyncio.Event()

    @method
    async def load(self, state: State) -> None:
        self.state = state

    @method
    async def copy(self, state: State) -> None:
        """Take a shard that came from elsewhere, in memory of this process."""
        self.state = {name: tensor.clone() for name, tensor in state.items()}

    @method
    async def hold(self, whole_and_parts: tuple[State, dict[str, list[list[int]]]]) -> None:
        """Have parts of tensors, from the first element to the end in each dimension, as views."""
        whole, parts = whole_and_parts
        self.state = {name: whole[name][tuple(slice(*bounds) for bounds in part)] for name, part in parts.items()}

    @method
    async def lend(self) -> State:
        return aiodaft.borrow(self.state)

    @method
    async def give(self) -> State:
        return self.state

    @method
    async def add(self, value: float) -> None:
        for tensor in self.state.values():
            tensor.add_(value)

    @method
    async def addresses(self, state: State) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in state.values())

    @method
    async def received(self) -> tuple[int, int]:
        """The payloads that have come to this process, and their bytes."""
        traffic = current_peer().connections.traffic()
        return traffic.payloads_received, traffic.payload_received

    @method
    async def sent(self) -> tuple[int, int]:
        """The payloads that this process has sent, and their bytes."""
        traffic = current_peer().connections.traffic()
        return traffic.payloads_sent, traffic.payload_sent

    @method
    async def most_on_the_way(self) -> int:
        """The most bytes on the way from and to this process, once there are none."""
        transit = resharding().transit
        while transit.now:
            await asyncio.sleep(0)
        return transit.most

    @method
    async def stored_bytes(self) -> int:
        """The memory that values of this process take besides their tensors."""
        return copied_bytes()

    @method
    async def blocks(self, at_most: int | None = None) -> int:
        """The blocks of memory that are in use here, once there are so few."""
        arena = cast("ShmTransport | TcpTransport", current_peer().store.transport).arena
        while at_most is not None and arena.live_blocks() > at_most:
            await asyncio.sleep(0)
            gc.collect()
        return arena.live_blocks()

    @method
    async def drop(self) -> None:
        """Keep no shard."""
        self.state = {}

    @method
    async def count_copies(self) -> None:
        """Count the bytes that are copied from now on."""
        self._copied = 0

        async def count(copy: Copy, job: Callable[[], object], nbytes: int) -> None:
            self._copied += nbytes
            await copy(job, nbytes)

        self._instead_of_copies(count)

    @method
    async def copied(self) -> int:
        """The bytes that were copied, from tensor to tensor, since `count_copies`."""
        return self._copied

    @method
    async def count_decoded(self) -> None:
        """Count the values that are decoded here from now on."""
        store, self._decoded = current_peer().store, 0
        decode = type(store).decode

        async def count(*args: Any, **kwargs: Any) -> Any:
            self._decoded += 1
            return await decode(store, *args, **kwargs)

        setattr(store, "decode", count)  # noqa: B010 - a method of this one object

    @method
    async def decoded(self) -> int:
        return self._decoded

    @method
    async def end(self) -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)

    @method
    async def end_at_parcel(self, count: int) -> None:
        """Kill this process instead of giving more parcels than `count`."""
        given = itertools.count()

        async def end(copy: Copy, job: Callable[[], object], nbytes: int) -> None:
            if next(given) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            await copy(job, nbytes)

        self._instead_of_copies(end)

    @method
    async def hold_parcels(self) -> None:
        """Give no parcels until `go_on`."""
        self._asked.clear()
        self._go_on.clear()

        async def hold(copy: Copy, job: Callable[[], object], nbytes: int) -> None:
            self._asked.set()
            await self._go_on.wait()
            await copy(job, nbytes)

        self._instead_of_copies(hold)

    @method
    async def write_at_parcel(self) -> None:
        """Write to the shard while the first parcel is copied."""
        writes = itertools.count()

        async def write(copy: Copy, job: Callable[[], object], nbytes: int) -> None:
            if not next(writes):
                for tensor in self.state.values():
                    tensor.add_(1.0)
            await copy(job, nbytes)

        self._instead_of_copies(write)

    def _instead_of_copies(self, action: Callable[[Copy, Callable[[], object], int], Awaitable[None]]) -> None:
        actor, lend = resharding(), resharding()._lend  # noqa: SLF001 - see above
        copy = partial(Resharding._copy, actor)  # noqa: SLF001 - see above
        setattr(actor, "_copy", partial(action, copy))  # noqa: B010 - a method of this one object

        async def lend_after(*args: Any) -> InPlace | None:
            await action(_nothing, bool, 0)
            return await lend(*args)

        setattr(actor, "_lend", lend_after)  # noqa: B010 - as above

    @method
    async def write_at_grant(self) -> None:
        """Write to the shard when the first part of it is granted to another process."""
        transport = current_peer().store.transport
        grant = transport.grant

        def grant_and_write(block: Block, control: Control) -> Grant:
            setattr(transport, "grant", grant)  # noqa: B010 - a method of this one object
            made = grant(block, control)
            for tensor in self.state.values():
                tensor.add_(1.0)
            return made

        setattr(transport, "grant", grant_and_write)  # noqa: B010 - as above

    @method
    async def wait_asked(self) -> None:
        await self._asked.wait()

    @method
    async def go_on(self) -> None:
        self._go_on.set()


class DeviceRank(Rank):
    """A rank with its shard on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = use_host_devices(0)

    @method
    async def copy(self, state: State) -> None:
        self.state = {
            name: self.driver.bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for name, tensor in state.items()
        }

    @method
    async def lend_slowly(self) -> State:
        """Lend a shard that the accelerator writes to until `finish`."""
        self.gate = self.driver.hold()
        for tensor in self.state.values():
            self.driver.enqueue(0, partial(tensor.data.add_, 1.0))
        return aiodaft.borrow(self.state)

    @method
    async def finish(self) -> None:
        self.gate.open = True

    @method
    async def copied_on_device(self) -> int:
        return self.driver.copied


class Reader(Rank):
    """A rank that counts the bytes that its process reads from files in place."""

    @method
    async def count_reads(self) -> None:
        self.bytes_read = 0
        read = os.preadv

        def counted(file: int, memory: list[Any], offset: int) -> int:
            count = read(file, memory, offset)
            self.bytes_read += count
            return count

        os.preadv = counted

    @method
    async def reads(self) -> int:
        return self.bytes_read

    @method
    async def end_in_write(self) -> None:
        """End the process with its second access to a file."""
        write, accesses = os.pwrite, iter([False])

        def once(*args: Any) -> int:
            if next(accesses, True):
                os.kill(os.getpid(), 9)
            return write(*args)

        os.pwrite = once


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that a tensor is."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


def whole_tensors(shardings: Mapping[str, Sharding]) -> State:
    """Tensors in which each element is another one."""
    made: State = {}
    for index, (name, one) in enumerate(shardings.items()):
        values = torch.arange(index + 1, index + 1 + int(torch.Size(one.shape).numel()), dtype=torch.float64)
        made[name] = values.reshape(tuple(one.shape)).to(one.dtype)
    return made


async def loaded(group: Group[Rank], layout: Layout, whole: State) -> Refs[State]:
    """Give each member its shard, and return refs of them."""
    await group.each(Rank.copy, [layout.shard(whole, rank) for rank in range(layout.size)])
    return group.all(Rank.lend)


async def assert_has(group: Group[Rank], layout: Layout, whole: State, new: Refs[State]) -> None:
    await group.each(Rank.load, new)
    for rank, state in enumerate(await group.all(Rank.give)):
        expected = layout.shard(whole, rank)
        assert {name: bits(tensor) for name, tensor in state.items()} == {
            name: bits(tensor) for name, tensor in expected.items()
        }


def bounds(layout: Layout, whole: State, rank: int) -> dict[str, list[list[int]]]:
    """The bounds of a rank's parts in each dimension."""
    parts = {name: layout.part(name, rank) for name in whole}
    return {name: [[one.start, one.stop] for one in part] for name, part in parts.items() if part is not None}


def in_place() -> bool:
    """Whether the ranks of a source write into the memory of those that they send to."""
    return current_peer().process.options.transport == "shm"


def tp(size: int, shape: tuple[int, ...] = (1024, 256), dim: int = 0) -> Layout:
    return Layout({"tp": size}, {"w": Sharding(shape=shape, dtype=torch.float32, dims={dim: "tp"})})
