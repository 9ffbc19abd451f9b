"""A program that names an actor in a cluster, as its argument says, and waits to be killed."""

from __future__ import annotations

import asyncio
import os
import sys

from parents import Child, Waiting

import aiodaft


async def main(how: str) -> None:
    async with aiodaft.Runtime() as rt:
        match how:
            case "supervised":
                actor = await rt.on(node="n2", restart="permanent").spawn(Child)
                await rt.name(actor, "supervised")
            case "cluster":
                actor = await rt.on(node="n2", lifetime="cluster", name="lasting").spawn(Child, 5)
            case "get_or_create":
                actor = await rt.on(lifetime="cluster").get_or_create("shared", Child)
            case _:
                # The path of a FIFO that nobody opens, and that of a file for the pid of the actor.
                await rt.on(lifetime="cluster", name="never").spawn(Waiting, f"{how}.pid", how)
                return
        print(os.getpid(), await actor.pid(), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    aiodaft.run(main(sys.argv[1]))
