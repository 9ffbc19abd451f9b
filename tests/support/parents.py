"""Actors that spawn actors."""

from __future__ import annotations

import asyncio
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import aiodaft
from aiodaft import Actor, method


def words_in(file: Path) -> list[str]:
    """The words that an actor has written into a file."""
    return file.read_text(encoding="utf-8").split() if file.exists() else []


async def pid_in(file: Path) -> int:
    """The number that an actor writes into a file, in time."""
    while not (words := words_in(file)):
        await asyncio.sleep(0.01)
    return int(words[0])


class Child(Actor):
    """Is spawned by others."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"cannot begin at {start}")
        self.number = start

    @method
    async def increment(self) -> int:
        self.number += 1
        return self.number

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    @method
    async def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    @method
    async def fail(self) -> None:
        raise ValueError("nobody looks")

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @method
    async def ask(self, parent: Parent) -> int:
        return await parent.answer()


class Waiting(Actor):
    """Cannot be made before a file is opened for writing."""

    def __init__(self, pid_file: str, gate: str) -> None:
        with open(pid_file, "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        with open(gate, encoding="utf-8"):
            pass


class Parent(Actor):
    """Spawns others."""

    def __init__(self) -> None:
        self.children: list[Any] = []

    @method(ordered=False)
    async def answer(self) -> int:
        return 42

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    def me(self) -> Parent:
        me: Parent = aiodaft.current_actor()
        return me

    @method
    async def introduce(self, other: Parent) -> int:
        """Give this actor to another one, which calls it."""
        return await other.adopt(aiodaft.current_actor())

    @method
    async def adopt(self, child: Parent) -> int:
        self.children.append(child)
        return await child.answer()

    @method
    async def pids(self) -> list[int]:
        return [await child.pid() for child in self.children]

    @method
    async def bear(self, start: int = 0, **constraints: Any) -> Child:
        child = await aiodaft.current_runtime().on(**constraints).spawn(Child, start)
        self.children.append(child)
        return child

    @method
    async def bear_parent(self, **constraints: Any) -> Parent:
        return await aiodaft.current_runtime().on(**constraints).spawn(Parent)

    @method
    async def bear_group(self, count: int, **constraints: Any) -> list[Child]:
        return list(await aiodaft.current_runtime().on(**constraints).group(count, Child))

    @method
    async def bear_of(self, module: str, name: str, **constraints: Any) -> Any:
        """Spawn an actor of a class that this process imports."""
        return await aiodaft.current_runtime().on(**constraints).spawn(getattr(import_module(module), name))

    @method
    async def ship(self, path: str) -> None:
        await aiodaft.current_runtime().ship(path)

    @method
    async def bear_waiting(self, pid_file: str, gate: str) -> None:
        await aiodaft.current_runtime().spawn(Waiting, pid_file, gate)

    @method
    async def sum_in_scope(self, count: int) -> tuple[int, list[int]]:
        """The sum of the answers of some children, and their pids; they end with the scope."""
        async with aiodaft.current_runtime().scope() as scope:
            group = await scope.group(count, Child, 1)
            return sum(await group.all(Child.increment)), await group.all(Child.pid)

    @method
    async def drop_a_failure(self) -> None:
        """Have a child fail, and look at nothing."""
        self.children[-1].fail()

    @method
    async def kill_child(self) -> int:
        """Kill the last child by a signal, as an accident does; returns its pid."""
        pid: int = await self.children[-1].pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    @method
    async def get_or_create(self, name: str, start: int) -> Child:
        return await aiodaft.current_runtime().get_or_create(name, Child, start)

    @method
    async def ask_child(self) -> int:
        return await self.children[-1].increment()

    @method
    async def let_ask(self) -> int:
        """Have the last child ask this actor, which waits for it."""
        return await self.children[-1].ask(await aiodaft.current_runtime().lookup("parent", Parent))

    @method
    async def stop(self, child: Child) -> None:
        await aiodaft.current_runtime().stop(child)

    @method
    async def look_at(self, child: Child) -> aiodaft.state.ActorInfo:
        return await aiodaft.current_runtime().info(child)

    @method
    async def name_child(self, name: str) -> tuple[str, ...]:
        rt = aiodaft.current_runtime()
        await rt.name(self.children[-1], name)
        return await rt.names()

    @method
    async def find(self, name: str) -> int:
        return await (await aiodaft.current_runtime().lookup(name, Child)).increment()

    @method
    def runtime_in_a_thread(self) -> None:
        aiodaft.current_runtime()

    @method
    async def open_its_runtime(self) -> None:
        async with aiodaft.current_runtime():
            pass

    @method
    async def close_its_runtime(self) -> None:
        await aiodaft.current_runtime().aclose()

    @method
    async def bear_from_a_task(self) -> Child:
        async with asyncio.TaskGroup() as tasks:
            bearing = tasks.create_task(self._bear())
        return bearing.result()

    async def _bear(self) -> Child:
        return await aiodaft.current_runtime().spawn(Child)


class Avenger(Child):
    """Kills a process while it ends."""

    def __init__(self, victim: int) -> None:
        super().__init__()
        self.victim = victim

    async def __aenter__(self) -> Avenger:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        os.kill(self.victim, signal.SIGKILL)


class Founder(Actor):
    """Spawns while it is made, and uses its children while it ends."""

    def __init__(self, notes: str, *, fails: bool = False) -> None:
        self.notes = notes
        self.fails = fails

    async def __aenter__(self) -> Founder:
        self.child = await aiodaft.current_runtime().spawn(Child)
        with open(self.notes, "w", encoding="utf-8") as file:
            file.write(str(await self.child.pid()))
        if self.fails:
            raise ValueError("it cannot be made")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write(f" {await self.child.increment()}")

    @method
    async def child_pid(self) -> int:
        return await self.child.pid()
