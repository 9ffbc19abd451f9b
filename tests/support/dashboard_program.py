"""A program with a dashboard: `python dashboard_program.py` prints its address, and ends when its input does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

from overseen import Middle, Source

import aiodaft
from aiodaft import dashboard

HOSTILE = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"


async def main() -> None:
    async with aiodaft.Runtime(unhandled="log", preload=()) as rt, dashboard.serve(rt, period=0.1) as address:
        # Before actors print.
        print(address, flush=True)
        hostile = await rt.spawn(type(HOSTILE, (Source,), {}))
        source = await rt.on(name="the-source").spawn(Source)
        middle = await rt.spawn(Middle, source)
        stopped = await rt.spawn(Source)
        await source.say(HOSTILE)
        large = source.make(4 << 20)
        await hostile.take(large)
        for actor in (hostile, source):
            with suppress(ValueError):
                await actor.fail(HOSTILE)
        with suppress(RuntimeError):
            await middle.wrap("bad")
        pid = (await rt.info(stopped)).pid
        os.kill(pid, signal.SIGSTOP)

        async def work() -> None:
            while True:
                await middle.ask(10)
                await hostile.take(source.make(1 << 20))

        working = asyncio.get_running_loop().create_task(work())
        await asyncio.to_thread(sys.stdin.read)
        working.cancel()
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    aiodaft.run(main())
