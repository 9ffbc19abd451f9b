"""Actors that tests use; importable in workers, and free of torch."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import aiodaft
from aiodaft import Actor, method
from aiodaft_transport.system import folder


class WithGate(Actor):
    """Has a gate for its calls to wait at, and a call that opens it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    @method(ordered=False)
    async def open(self) -> None:
        self.gate.set()


class Echo(Actor):
    """Gives back its arguments, in every way there is."""

    @method
    async def echo(self, value: Any) -> Any:
        return value

    @method
    def echo_on_thread(self, value: Any) -> Any:
        return value

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def kwargs(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Writer(Actor):
    """Writes files."""

    @method
    def write(self, path: str, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data)


class Log(Actor):
    """Notes the order in which its calls start."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.gate = asyncio.Event()
        self.entered: list[Any] = []

    @method
    def note(self, item: Any) -> None:
        self.seen.append(item)

    @method
    async def note_async(self, item: Any) -> None:
        self.seen.append(item)

    @method(ordered=False)
    async def note_unordered(self, item: Any) -> None:
        self.seen.append(item)

    @method(concurrency=2)
    async def note_two_at_a_time(self, item: Any) -> int:
        self.entered.append(item)
        self.seen.append(item)
        running = len(self.entered)
        await asyncio.sleep(0)
        self.entered.remove(item)
        return running

    @method(concurrency=1)
    async def note_slowly(self, item: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append(item)

    @method
    async def all(self) -> list[Any]:
        return self.seen

    @method
    async def open_gate(self) -> None:
        self.gate.set()

    @method
    async def after_gate(self, item: Any) -> Any:
        await self.gate.wait()
        self.seen.append(item)
        return item


class Sleeper(Actor):
    """Waits, and tells how it ended."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.release = threading.Event()

    @method
    async def sleep(self, seconds: float, name: str = "sleep") -> str:
        self.events.append(f"{name} began")
        try:
            await asyncio.sleep(seconds)
        finally:
            self.events.append(f"{name} cleaned up")
        return name

    @method
    async def stubborn(self, seconds: float) -> str:
        """Does not let itself be cancelled."""
        end = asyncio.get_running_loop().time() + seconds
        while (left := end - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                self.events.append("refused to be cancelled")
        return "done all the same"

    @method
    def block(self, seconds: float) -> str:
        """Holds the actor's thread, not its loop."""
        self.events.append("block began")
        self.release.wait(seconds)
        self.release.clear()
        return "unblocked"

    @method(ordered=False)
    async def unblock(self) -> None:
        self.release.set()

    @method
    async def history(self) -> list[str]:
        """The events so far; answered when every earlier call of the caller has begun."""
        return self.events

    @method
    async def time_left(self, other: Sleeper | None = None) -> float:
        """The rest of the deadline here, or one call further."""
        if other is not None:
            return await other.time_left()
        from aiodaft._runtime.platform.tasks import current_terms, deadline_of

        deadline = deadline_of(current_terms.get())
        return float("inf") if deadline is None else deadline - asyncio.get_running_loop().time()

    @method(concurrency=1)
    async def time_left_alone(self) -> float:
        """The same, once `unblock` was called."""
        while not self.release.is_set():
            await asyncio.sleep(0)
        return await self.time_left()

    @method
    async def jump(self, hours: float) -> None:
        """Put the clock on the wall of this process forward or back, and stop it."""
        now = time.time()
        time.time = lambda: now + 3600 * hours

    @method
    async def call(self, other: Sleeper, seconds: float) -> str:
        """Waits for another actor's wait."""
        try:
            return await other.sleep(seconds, "nested")
        finally:
            self.events.append("call cleaned up")


class Streamer(Actor):
    """Yields."""

    def __init__(self) -> None:
        self.made = 0
        self.finished = 0

    @method
    async def numbers(self, count: int) -> AsyncIterator[int]:
        try:
            for index in range(count):
                self.made = index + 1
                yield index
        finally:
            self.finished += 1

    @method
    async def stalling(self) -> AsyncIterator[int]:
        """One item, and no other."""
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            self.finished += 1

    @method
    async def blobs(self, count: int, size: int) -> AsyncIterator[bytearray]:
        for index in range(count):
            yield bytearray([index]) * size if index % 2 == 0 else bytearray([index])

    @method
    async def fail_after(self, count: int) -> AsyncIterator[int]:
        for index in range(count):
            yield index
        raise ValueError("the stream broke")

    @method
    async def progress(self) -> tuple[int, int]:
        return self.made, self.finished


class Relay(Actor):
    """Passes on, holds, and makes refs."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    @method
    async def hold(self, box: Box) -> str:
        """Keeps a ref that came inside an object."""
        self.held.append(box.ref)
        return type(box.ref).__name__

    @method
    async def read_held(self) -> Any:
        return await self.held[-1]

    @method
    async def wait_held(self) -> str:
        """Waits for a held ref with asyncio's tool and with its own; says how its call ended."""
        ref = self.held[-1]
        await asyncio.wait([ref])
        await ref.ready()
        await ref.released()
        return repr(ref.exception())

    @method
    async def drop_held(self) -> None:
        self.held.clear()

    @method
    async def call_other(self, other: Echo, value: Any) -> Any:
        return await other.echo(value)

    @method
    async def call_stubborn(self, other: Any) -> Any:
        return await other.stubborn(None)

    @method
    async def note_all(self, log: Log, caller: int, count: int) -> None:
        await asyncio.gather(*(log.note((caller, index)) for index in range(count)))

    @method
    async def ref_of_other(self, other: Echo, value: Any) -> Any:
        """A ref inside a result: the caller awaits it."""
        return Box(other.echo(value))

    @method
    def call_from_thread(self, other: Echo, value: Any) -> Any:
        """A def method may call, but not await."""
        return Box(other.echo(value))

    @method
    async def tell_and_fail(self, other: Any) -> None:
        """Makes a call that fails, and drops its ref."""
        other.raise_value_error("no code sees this")
        await asyncio.sleep(0.05)


class Box:
    """An ordinary object: a ref in it travels as a ref."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref


class SlowStart(Actor):
    """Takes its time, or fails, while it is made."""

    def __init__(self, seconds: float = 0.0, error: str = "", exit_code: int | None = None) -> None:
        if exit_code is not None:
            os._exit(exit_code)
        time.sleep(seconds)  # noqa: TID251 - a constructor runs on the actor's thread
        if error:
            raise ValueError(error)

    @method
    async def ready(self) -> bool:
        return True


class Entered(Actor):
    """A context manager: the runtime enters and leaves it."""

    def __init__(self, path: str, farewell: str = "left") -> None:
        self.path = path
        self.farewell = farewell
        self.entered = False

    async def __aenter__(self) -> Entered:
        self.entered = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{self.farewell}\n")

    @method
    async def is_entered(self) -> bool:
        return self.entered


class NeedsGpu(Actor, gpus=1):
    """Wants one GPU, as its class line says."""

    @method
    async def visible(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


class Plain:
    """Knows nothing of aiodaft."""

    def __init__(self, base: int) -> None:
        self.base = base

    def add(self, value: int, *, times: int = 1) -> int:
        return self.base + value * times

    async def add_later(self, value: int) -> int:
        return self.base + value

    def _private(self) -> int:
        return self.base


class Trainer(Actor):
    """A member of a group."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.total = 0.0

    @method
    async def step(self, batch: list[int]) -> float:
        self.total += self.lr * sum(batch)
        return self.total

    @method
    async def sleepy_step(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def fail_if(self, bad: bool) -> bool:
        if bad:
            raise ValueError("this member fails")
        return bad

    @method
    async def words(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word


class Sender(Actor):
    """The sending end of a channel."""

    @method
    async def send_all(self, channel: aiodaft.Channel[Any], items: list[Any], *, close: bool = True) -> int:
        for item in items:
            await channel.send(item)
        if close:
            await channel.aclose()
        return len(items)


class Receiver(Actor):
    """The receiving end of a channel."""

    @method
    async def receive_all(self, channel: aiodaft.Channel[Any]) -> list[Any]:
        return [item async for item in channel]

    @method
    async def receive(self, channel: aiodaft.Channel[Any], count: int) -> list[Any]:
        return [await channel.recv() for _ in range(count)]


class Lingering(Actor):
    """Has the objects that UCX has while it starts."""

    @method
    async def make_folder(self) -> str:
        self._folder = folder()
        return os.path.basename(self._folder.__enter__())

    @method
    async def pid(self) -> int:
        return os.getpid()
