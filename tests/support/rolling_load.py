"""A controller that calls supervised actors until it is told to stop, by the end of its input, and counts.

It prints "ready", and in the end the outcomes of its calls, as JSON. Each call is noted in a file where it runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter

import aiodaft
from aiodaft import Restart, method

ACTORS = 6
CALLERS = 3
SIZE = 300_000


class Counting(aiodaft.Actor, restart=Restart(intensity=1, period=600)):
    """Notes the calls that run."""

    def __init__(self, notes: str) -> None:
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @method
    async def note(self, what: str) -> str:
        os.write(self._notes, f"{what}\n".encode())
        await asyncio.sleep(0)
        return what

    @method
    def work(self, what: str, data: bytes) -> tuple[str, bytes]:
        """On the actor's thread, with a value that goes both ways."""
        os.write(self._notes, f"{what}\n".encode())
        return what, data

    @method
    async def ask(self, other: Counting, what: str) -> str:
        """From actor to actor."""
        return await other.note(what)


class Load:
    """Calls actors, one after the other from each caller, and counts the errors by their text."""

    def __init__(self, actors: list[Counting], name: str) -> None:
        self._actors = actors
        self._name = name
        self._stopped = asyncio.Event()
        self.made: list[str] = []
        self.lost: Counter[str] = Counter()

    def stop(self) -> None:
        self._stopped.set()

    async def call(self, caller: int) -> None:
        number, data = 0, bytes(SIZE)
        while not self._stopped.is_set():
            for index, actor in enumerate(self._actors):
                number += 1
                what = f"{self._name} {caller} {number}"
                self.made.append(what)
                try:
                    if number % 3 == 0:
                        answer, back = await actor.work(what, data)
                        assert back == data
                    elif number % 3 == 1:
                        answer = await actor.note(what)
                    else:
                        answer = await actor.ask(self._actors[index - 1], what)
                    assert answer == what
                except aiodaft.DaftError as error:
                    self.lost[f"{type(error).__name__}: {error}"] += 1


async def main(name: str, notes: str) -> None:
    async with aiodaft.Runtime(unhandled="log") as rt:
        actors = [await rt.on(spread=True).spawn(Counting, notes) for _ in range(ACTORS)]
        await rt.name(actors[0], f"first-of-{name}")
        load, loop = Load(actors, name), asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), load.stop)
        print("ready", flush=True)
        await asyncio.gather(*map(load.call, range(CALLERS)))
        loop.remove_reader(sys.stdin.fileno())
        # Its name, too, came through all that.
        found = await rt.lookup(f"first-of-{name}", Counting)
        assert found == actors[0]
        moves = sum([(await rt.info(actor)).restarts for actor in actors])
        print(json.dumps({"made": load.made, "lost": load.lost, "moves": moves}), flush=True)


if __name__ == "__main__":
    aiodaft.run(main(*sys.argv[1:]))
