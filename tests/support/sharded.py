"""Actors with shards of tensors, which look at how these are moved."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import torch
from here import copied_bytes, current_peer
from torch import Tensor

import aiodaft
from aiodaft import Actor, method
from aiodaft._protocol.ids import RESHARDING
from aiodaft._runtime.groups import resharding as module
from aiodaft._runtime.groups.resharding import Resharding

State: TypeAlias = dict[str, Tensor]
Take: TypeAlias = Callable[[int, int], Awaitable[None]]


def resharding() -> Resharding:
    found = current_peer().actors[RESHARDING].instance
    assert isinstance(found, Resharding)
    return found


class Rank(Actor):
    """One rank with its shard."""

    def __init__(self) -> None:
        self.state: State = {}
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
    async def end_at_cut(self, count: int) -> None:
        """Kill this process instead of giving more parcels than `count`."""
        given = itertools.count()

        async def end(take: Take, nbytes: int, bound: int) -> None:
            if next(given) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            await take(nbytes, bound)

        self._before_cuts(end)

    @method
    async def hold_cuts(self) -> None:
        """Give no parcels until `go_on`."""
        self._asked.clear()
        self._go_on.clear()

        async def hold(take: Take, nbytes: int, bound: int) -> None:
            self._asked.set()
            await self._go_on.wait()
            await take(nbytes, bound)

        self._before_cuts(hold)

    @method
    async def write_at_cut(self) -> None:
        """Write to the shard while the first parcel is cut."""
        fill = getattr(module, "_fill")  # noqa: B009 - to put another function in its place

        def write_and_fill(*args: object) -> None:
            setattr(module, "_fill", fill)  # noqa: B010 - as above
            for tensor in self.state.values():
                tensor.add_(1.0)
            fill(*args)

        setattr(module, "_fill", write_and_fill)  # noqa: B010 - as above

    def _before_cuts(self, wait: Callable[[Take, int, int], Awaitable[None]]) -> None:
        room = resharding().cut_room
        setattr(room, "take", partial(wait, room.take))  # noqa: B010 - a method of this one object

    @method
    async def wait_asked(self) -> None:
        await self._asked.wait()

    @method
    async def go_on(self) -> None:
        self._go_on.set()


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that a tensor is."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()
