"""What a job runs: calls between actors on all nodes; then, with the argument "wait", until it is told to end.

It ends with status 7; with the argument "well", 0. With "stay" it does not end, whatever it is told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from travellers import Traveller

import aiodaft


async def main(*arguments: str) -> None:
    async with aiodaft.Runtime() as rt:
        actors = [await rt.on(node=name).spawn(Traveller) for name in ("n1", "n2")]
        assert await actors[1].ask(actors[0], 1) == 2
        if "stay" in arguments:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The script, the process that started it, and those of the actors.
        print("pids", os.getpid(), os.getppid(), *[await actor.pid() for actor in actors], flush=True)
        if "stay" in arguments:
            await asyncio.Event().wait()
        if "wait" in arguments:
            try:
                await asyncio.Event().wait()
            finally:
                print("the script has ended in order", flush=True)
    sys.exit(0 if "well" in arguments else 7)


if __name__ == "__main__":
    aiodaft.run(main(*sys.argv[1:]))
