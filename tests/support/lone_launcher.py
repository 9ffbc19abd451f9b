"""A controller that starts a cluster by ssh, with an actor on each node; it waits to be killed.

`python lone_launcher.py KEY_FILE SSH OPTION...`
"""

from __future__ import annotations

import asyncio
import sys

from travellers import Traveller

import aiodaft
import aiodaft.launch


async def main(key_file: str, *command: str) -> None:
    async with (
        aiodaft.launch.ssh(["n1", "n2"], key_file=key_file, command=command) as address,
        aiodaft.Runtime(address, key_file=key_file) as rt,
    ):
        first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
        print(await first.pid(), await second.pid(), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    aiodaft.run(main(*sys.argv[1:]))
