"""A controller with an actor on each node of a cluster, the last of them with a name; it waits to be killed."""

from __future__ import annotations

import asyncio
import os

from travellers import Traveller

import aiodaft


async def main() -> None:
    async with aiodaft.Runtime() as rt:
        first = await rt.on(node="n1").spawn(Traveller)
        second = await rt.on(node="n2").spawn(Traveller)
        await rt.name(second, "traveller")
        print(os.getpid(), await first.pid(), await second.pid(), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    aiodaft.run(main())
