"""Controller programs that come to an end of every kind: `python controllers.py <how>`.

Each prints the pids of its fork server, of an actor and of the program that it has started, and then goes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from actors import Echo, Sleeper
from graph_actors import Node
from inside import fork_server_of
from odd_actors import Parent

import aiodaft


async def family(rt: aiodaft.Runtime) -> Parent:
    """An actor with descendants of every kind, which are told of."""
    parent = await rt.spawn(Parent)
    pids = [await parent.pid(), *await parent.fork_a_family(), await parent.start_a_daemon()]
    print(fork_server_of(rt), *pids, await parent.start_in_background(), flush=True)
    return parent


async def wait() -> None:
    """Until killed."""
    async with aiodaft.Runtime(preload=()) as rt:
        await family(rt)
        await asyncio.Event().wait()


async def hold_interpreter() -> None:
    """Its actor is deaf to everything."""
    async with aiodaft.Runtime(preload=()) as rt:
        await (await family(rt)).hold_interpreter()


async def stop_the_fork_server() -> None:
    """So that it cannot clear up."""
    async with aiodaft.Runtime(preload=()) as rt:
        await family(rt)
        os.kill(fork_server_of(rt), signal.SIGSTOP)
        await asyncio.Event().wait()


async def run_a_graph() -> None:
    """Has runs under way, over links that are rings."""
    async with aiodaft.Runtime(preload=()) as rt:
        await family(rt)
        a, b = await rt.spawn(Node), await rt.spawn(Node)
        async with aiodaft.compile(lambda x: b.same(a.same(x))) as graph:
            while True:
                await asyncio.gather(*(graph(index) for index in range(10)))
                print("passed", flush=True)


async def leave_open() -> None:
    """Ends the loop and forgets the runtime."""
    await family(await aiodaft.start(preload=()))


async def be_terminated() -> None:
    """Has a call under way that wants to clean up."""
    async with aiodaft.Runtime(preload=()) as rt:
        sleeper = await rt.spawn(Sleeper)
        ref = sleeper.sleep(60)
        await sleeper.history()
        await family(rt)
        try:
            await ref
        finally:
            print(*await sleeper.history(), sep=", ", flush=True)


async def move_payloads() -> None:
    """Tells of each step: values are put, passed on and dropped all the time."""
    async with aiodaft.Runtime(preload=()) as rt:
        await family(rt)
        a, b = await rt.spawn(Echo), await rt.spawn(Echo)
        for step in range(10_000):
            size = (step % 5 + 1) << 20
            value = rt.put(bytes([step % 256]) * size)
            passed = b.echo(a.echo(value))
            print("passing", flush=True)
            result: Any = await passed
            assert result[-1] == step % 256
            print("passed", flush=True)


def in_a_thread_that_ends() -> None:
    """The process lives on."""

    def run() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave_open())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    signal.pause()


PROGRAMS: dict[str, Callable[[], object]] = {
    "waits": lambda: asyncio.run(wait()),
    "its actor holds the interpreter": lambda: asyncio.run(hold_interpreter()),
    "its fork server is stopped": lambda: asyncio.run(stop_the_fork_server()),
    "runs a graph": lambda: asyncio.run(run_a_graph()),
    "leaves the runtime open": lambda: asyncio.run(leave_open()),
    "ends the thread of its loop": in_a_thread_that_ends,
    "is terminated": lambda: aiodaft.run(be_terminated()),
    "moves payloads": lambda: asyncio.run(move_payloads()),
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
