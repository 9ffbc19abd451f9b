"""Actors that hand workflows on to each other."""

from __future__ import annotations

import asyncio

from aiodaft import Actor, method


class Stage(Actor):
    """Does one step of a workflow, and hands it on to the next stage."""

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._hops: list[int] = []
        self._ended: list[int] = []
        self._count = 0
        self._all_ended = asyncio.Event()

    @method
    async def meet(self, stages: list[Stage]) -> None:
        """The stages, this one among them."""
        self._stages = stages

    @method
    async def run(self, names: list[int], hops: int) -> list[int]:
        """Begin workflows, and wait until they have come back."""
        self._count = len(names)
        for name in names:
            self._stages[(name + hops) % len(self._stages)].step.tell(name, hops)
        await self._all_ended.wait()
        return self._ended

    @method
    async def step(self, name: int, hops: int) -> None:
        self._hops.append(name)
        if hops > 1:
            self._stages[(name + hops - 1) % len(self._stages)].step.tell(name, hops - 1)
        else:
            self._stages[name % len(self._stages)].came_back.tell(name)

    @method
    async def came_back(self, name: int) -> None:
        self._ended.append(name)
        if len(self._ended) == self._count:
            self._all_ended.set()

    @method
    async def hops(self) -> list[int]:
        """The workflows that made a step here, once for each."""
        return self._hops

    @method
    async def large(self, size: int) -> bytes:
        return bytes(size)
