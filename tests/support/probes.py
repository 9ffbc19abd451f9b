"""Actors that look at where they are, and actors that cannot be made or used as they should be."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import environment_at_import
from here import current_peer

import aiodaft
from aiodaft import Actor, method


class Thing:
    """An object with an identity; `padding` makes it large enough to stay at its producer."""

    def __init__(self, padding: int = 0) -> None:
        self.padding = bytes(padding)


class Importing(Actor):
    """Its process imports a module when it is made."""

    def __init__(self, name: str) -> None:
        importlib.import_module(name)


class Probe(Actor):
    """Tells of its process and of its arguments."""

    def __init__(self) -> None:
        self.thing: Any = None

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    @method
    async def set_environ(self, name: str, value: str) -> None:
        os.environ[name] = value

    @method
    async def surroundings(self, names: tuple[str, ...]) -> tuple[dict[str, str | None], str, list[str], list[str]]:
        """Some variables of the environment, the working directory, sys.path and sys.argv."""
        return {name: os.environ.get(name) for name in names}, os.getcwd(), sys.path, sys.argv

    @method
    async def utc_offset(self) -> str:
        return time.strftime("%z")

    @method
    async def seen_at_import(self, name: str) -> str | None:
        """A variable as it was when a module was imported."""
        return environment_at_import.SEEN.get(name)

    @method
    async def only_there(self) -> tuple[int, str]:
        """The version of a module that only another virtual environment has, and the interpreter."""
        return importlib.import_module("only_there").VERSION, sys.executable

    @method
    async def from_a_child(self) -> tuple[int, str]:
        return await (await aiodaft.current_runtime().spawn(Probe)).only_there()

    @method
    async def has_module(self, name: str) -> bool:
        return name in sys.modules

    @method
    async def loop_module(self) -> str:
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    @method
    async def make(self, padding: int = 0) -> Thing:
        thing = self.thing = Thing(padding)
        return thing

    @method
    async def same_as_mine(self, thing: Any) -> bool:
        return thing is self.thing

    @method
    async def same_as_others(self, other: Probe, padding: int) -> bool:
        """Asks a neighbour for an object, and gives it back by value and by ref."""
        thing = await other.make(padding)
        return await other.same_as_mine(thing) and await other.same_as_mine(other.make(padding))

    @method
    async def inner_runtime(self, value: Any) -> tuple[Any, int]:
        """Opens a runtime inside a worker; gives the returned value and the pid that it came from."""
        async with aiodaft.Runtime(gpus=0) as inner:
            actor = await inner.spawn(Probe)
            return await actor.echo(value), await actor.pid()

    @method
    async def echo(self, value: Any) -> Any:
        return value

    @method
    async def spoil_link(self, data: bytes, to: str) -> None:
        """Writes bytes that are no message into the link home, or into the one to another actor's process."""
        peer = current_peer()
        connection = peer.connections[
            peer.process.options.agent
            if to == "home"
            else next(p for p in peer.connections if p != peer.process.options.agent)
        ]
        link = connection._socket  # noqa: SLF001 - the data break the protocol
        assert link is not None
        link.send(data)
        await asyncio.Event().wait()

    @method
    async def call(self, other: Probe, value: Any) -> Any:
        return await other.echo(value)


class Careless(Actor):
    """Has parts that cannot be reached through a handle."""

    limit = 3

    def undecorated(self) -> int:
        return self.limit

    @property
    def size(self) -> int:
        return self.limit

    @method
    async def decorated(self, first: int, second: str = "", *, third: float = 0.0) -> int:
        return first

    @method
    async def stream(self, count: int) -> AsyncIterator[int]:
        for index in range(count):
            yield index


class Abstract(Actor, ABC):
    """Is not finished."""

    @method
    @abstractmethod
    async def missing(self) -> None: ...


class DiesInConstructor(Actor):
    """Does not survive being made."""

    def __init__(self, how: str) -> None:
        print(f"about to {how}", file=sys.stderr)
        if how == "exit":
            sys.exit(7)
        if how == "_exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    @method
    async def ready(self) -> bool:
        return True


class StuckInConstructor(Actor):
    """Says that it is being made, and never is."""

    def __init__(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        threading.Event().wait()

    @method
    async def ready(self) -> bool:
        return True


class Half(Actor, cpus=1, gpus=0.5, resources={"disk": 2}):
    """Names its needs in its class line."""

    @method
    async def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


class HalfChild(Half, gpus=2):
    """Tells only the differences."""


class Kind(Actor):
    """Its subclass answers otherwise."""

    @method
    async def kind(self) -> str:
        return "base"

    @method
    async def kind_of(self, other: Kind) -> str:
        return await other.kind()


class Derived(Kind):
    @method
    async def kind(self) -> str:
        return "derived"


class Member(Actor):
    """A member of a group; the test lets its calls go."""

    def __init__(self, scale: int = 1) -> None:
        self.scale = scale
        self.gate = asyncio.Event()
        self.running = 0
        self.most = 0
        self.events: list[str] = []

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def times(self, value: int, *, plus: int = 0) -> int:
        return value * self.scale + plus

    @method
    async def held(self, value: Any) -> Any:
        """Waits for `open`."""
        self.running += 1
        self.most = max(self.most, self.running)
        self.events.append(f"{value} began")
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
            self.events.append(f"{value} ended")
        return value

    @method
    async def hold_first(self, value: int) -> int:
        """Waits for `open` if the value is 0."""
        return await Member.held.__wrapped__(self, value) if value == 0 else value

    @method
    async def padded(self, value: int) -> bytes:
        """A result of 8 MiB; that of 0 waits for `open`."""
        return bytes([await Member.hold_first.__wrapped__(self, value)]) * (8 << 20)

    @method
    async def open(self) -> None:
        self.gate.set()

    @method
    async def close(self) -> None:
        self.gate.clear()

    @method
    async def history(self) -> list[str]:
        return self.events

    @method
    async def odd_fails(self, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value

    @method
    async def total(self, values: list[int]) -> int:
        return sum(values) * self.scale

    @method
    async def words(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word

    def undecorated(self) -> None: ...


# That of the worker, and that of the call.
_OWN_TASKS = 2


class Courier(Actor):
    """Sends, receives and passes on channels."""

    def __init__(self) -> None:
        self.sent = 0
        self.taken: list[Any] = []
        self.channel: aiodaft.Channel[Any] | None = None

    @method
    async def send(self, channel: aiodaft.Channel[Any], items: list[Any]) -> int:
        for item in items:
            await channel.send(item)
            self.sent += 1
        return self.sent

    @method
    async def count(self) -> int:
        return self.sent

    @method
    async def receive(self, channel: aiodaft.Channel[Any], count: int) -> list[Any]:
        for _ in range(count):
            self.taken.append(await channel.recv())
        return self.taken

    @method
    async def drain(self, channel: aiodaft.Channel[Any]) -> list[Any]:
        return [item async for item in channel]

    @method
    async def make(self, capacity: int) -> aiodaft.Channel[Any]:
        """The channel's queue starts here."""
        return aiodaft.Channel(capacity)

    @method
    async def hand_on(self, other: Courier, channel: aiodaft.Channel[Any], items: list[Any]) -> int:
        return await other.send(channel, items)

    @method
    async def keep(self, channel: aiodaft.Channel[Any]) -> None:
        self.channel = channel

    @method
    async def drain_kept(self) -> list[Any]:
        assert self.channel is not None
        return [item async for item in self.channel]

    @method
    async def have_kept_drained(self, receiver: Courier) -> list[Any]:
        assert self.channel is not None
        return await receiver.drain(self.channel)

    @method
    async def drop_kept(self) -> None:
        self.channel = None

    @method
    async def forget_taken(self) -> None:
        self.taken.clear()

    @method
    async def close_kept(self) -> None:
        assert self.channel is not None
        await self.channel.aclose()

    @method
    async def send_kept(self, items: list[Any]) -> int:
        assert self.channel is not None
        return await Courier.send.__wrapped__(self, self.channel, items)

    @method
    async def is_alone(self) -> bool:
        """Whether this process knows that no other one holds its only channel."""
        (end,) = current_peer().channels.table.ends.values()
        return end.is_alone

    @method
    async def has_queue(self) -> bool:
        """Whether this process has the queue of a channel."""
        return bool(current_peer().channels.table.keepers)

    @method
    async def misses_a_sender(self) -> bool:
        """Whether this process, which has the queue of its only channel, knows that a sender has died."""
        (keeper,) = current_peer().channels.table.keepers.values()
        return keeper.missed is not None

    @method
    async def both(self, channel: aiodaft.Channel[Any], items: list[Any]) -> list[Any]:
        """Is its own receiver."""
        async with asyncio.TaskGroup() as group:
            received = group.create_task(Courier.drain.__wrapped__(self, channel))
            group.create_task(Courier.send.__wrapped__(self, channel, items)).add_done_callback(
                lambda _: group.create_task(channel.aclose())
            )
        return received.result()

    @method
    async def traces(self) -> list[int]:
        """The rest of channels here: their queues and ends, the memory of items, and tasks beside this one."""
        peer = current_peer()
        blocks = sum(transport.arena.live_blocks() for transport in peer.store.transports.values())
        table = peer.channels.table
        return [len(table.keepers), len(table.ends), blocks, len(asyncio.all_tasks()) - _OWN_TASKS]

    @method
    async def sums(self, channel: aiodaft.Channel[Any]) -> list[float]:
        """Receives tensors."""
        return [float(item.sum()) async for item in channel]


class FirstIsQuick(Actor):
    """The first one is made at once; the others wait until the test writes to a fifo."""

    def __init__(self, folder: str) -> None:
        try:
            os.mkdir(f"{folder}/first")
        except FileExistsError:
            with open(f"{folder}/fifo", encoding="utf-8") as fifo:
                fifo.read()
