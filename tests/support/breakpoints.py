"""A program whose actors come to breakpoints: `python breakpoints.py PLAN`."""

from __future__ import annotations

import asyncio
import pdb
import sys

import aiodaft


class Stopper(aiodaft.Actor):
    @aiodaft.method
    async def wait(self, number: int) -> int:
        doubled = number * 2
        breakpoint()
        await asyncio.sleep(0.01)
        return doubled

    @aiodaft.method
    def compute(self, number: int) -> int:
        doubled = number * 2
        pdb.set_trace()
        return doubled

    @aiodaft.method
    def examine(self) -> str:
        try:
            return str(1 // 0)
        except ZeroDivisionError as error:
            pdb.post_mortem(error.__traceback__)
            return "examined"

    @aiodaft.method
    async def ping(self) -> str:
        return "pong"


async def steps(rt: aiodaft.Runtime) -> None:
    first, second = await rt.spawn(Stopper), await rt.spawn(Stopper)
    stopped = first.wait(1)
    while (await rt.info(first)).running != ("Stopper.wait (in the debugger)",):
        assert await second.ping() == "pong"
    print("others go on")
    print("wait gave", await stopped)
    print("compute gave", await second.compute(2))
    print("examine gave", await second.examine())
    print("wait again gave", await first.wait(3))


async def two_at_once(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Stopper)
    print("both gave", await group.all(Stopper.compute, 3))


async def all_kinds(rt: aiodaft.Runtime) -> None:
    stopper = await rt.spawn(Stopper)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("they gave", await stopper.wait(1), await stopper.compute(2), await stopper.examine())


async def main() -> None:
    plans = {"steps": steps, "two_at_once": two_at_once, "all_kinds": all_kinds}
    async with aiodaft.Runtime(preload=()) as rt:
        await plans[sys.argv[1]](rt)


if __name__ == "__main__":
    aiodaft.run(main())
