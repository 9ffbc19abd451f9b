"""The script of a job: calls between actors on all nodes; then, with the arguments "wait FILE", until it is told to
end.

Then it calls the actors again, and writes their answers into the file. It ends with status 7; with the argument
"well", 0. With "stay" it does not end, even when it is told to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from travellers import Traveller

import aiodaft


async def main(*arguments: str) -> None:
    async with aiodaft.Runtime() as rt:
        actors = [await rt.on(node=name).spawn(Traveller) for name in ("n1", "n2")]
        assert await actors[1].ask(actors[0], 1) == 2
        if "stay" in arguments:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The script, the process that started it, and those of the actors.
        pids = [await actor.pid() for actor in actors]
        print("pids", os.getpid(), os.getppid(), *pids, flush=True)
        if "stay" in arguments:
            await asyncio.Event().wait()
        if "wait" in arguments:
            try:
                await asyncio.Event().wait()
            finally:
                said = "in order" if [await actor.pid() for actor in actors] == pids else "not in order"
                await asyncio.to_thread(Path(arguments[1]).write_text, said)
    sys.exit(0 if "well" in arguments else 7)


if __name__ == "__main__":
    aiodaft.run(main(*sys.argv[1:]))
