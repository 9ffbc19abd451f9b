"""A random program of channels for simulations: processes that send, receive, give up and are killed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sim_program import Program
from simulated import SimulatedLoop

import aiodaft
from aiodaft import Actor, Channel, method


@dataclass
class Cargo:
    """An onlooker's record of every item of one channel."""

    loop: SimulatedLoop
    name: int
    # The items that were sent, and the items that users have seen, with the process they were seen in.
    sent: set[tuple[int, int]] = field(default_factory=set)
    seen: list[tuple[str, tuple[int, int]]] = field(default_factory=list)
    # A task gave up a receive or a send.
    given_up: bool = False
    # It was refused, although nobody had closed the channel.
    refused: bool = False

    of: ClassVar[dict[int, Cargo]] = {}


def packed(channel: int, sender: int, index: int) -> Any:
    """An item: plain, encoded, or large enough to stay with its sender."""
    what = f"{channel} {sender} {index}"
    return (what, [what, "x" * 50], [what, what.encode() * 20_000])[(sender + index) % 3]


async def send(channel: Channel[Any], name: int, sender: int, count: int, seconds: float) -> None:
    """Send items, and give up when the time is over."""
    cargo = Cargo.of[name]
    try:
        async with asyncio.timeout(seconds):
            for index in range(count):
                await channel.send(packed(name, sender, index))
                cargo.sent.add((sender, index))
    except TimeoutError:
        cargo.given_up = True


async def receive(channel: Channel[Any], name: int, seconds: float) -> None:
    """Receive until the channel ends; each receive is given up after a while, and tried again."""
    cargo = Cargo.of[name]
    while True:
        try:
            async with asyncio.timeout(seconds):
                item = await channel.recv()
        except TimeoutError:
            cargo.given_up = True
            seconds = 2 * seconds + 0.001
        except aiodaft.ChannelClosed:
            return
        else:
            what = item if isinstance(item, str) else item[0]
            _, sender, index = map(int, what.split())
            assert item == packed(name, sender, index)
            cargo.seen.append((cargo.loop.current.name, (sender, index)))


class Porter(Actor):
    """A process that uses channels."""

    def __init__(self) -> None:
        self.kept: dict[int, Channel[Any]] = {}

    @method
    async def keep(self, channel: Channel[Any], name: int) -> None:
        self.kept[name] = channel

    @method
    async def send_kept(self, name: int, count: int) -> None:
        """Send, close and drop a channel that was kept."""
        channel = self.kept.pop(name)
        try:
            await send(channel, name, 1, count, 60.0)
        except aiodaft.ChannelClosed:
            Cargo.of[name].refused = True
        await channel.aclose()

    @method
    async def make(self, capacity: int) -> Channel[Any]:
        return Channel(capacity)

    @method
    async def send(self, channel: Channel[Any], name: int, sender: int, count: int, seconds: float) -> None:
        await send(channel, name, sender, count, seconds)

    @method
    async def receive(self, channel: Channel[Any], name: int, seconds: float) -> None:
        await receive(channel, name, seconds)

    @method
    async def drop(self) -> None:
        """Nothing is kept here."""


class ChannelProgram(Program):
    """The program of one seed."""

    def __init__(self, seed: object) -> None:
        super().__init__(f"channels {seed}")
        self.channels = 0

    async def _spawn(self, rt: aiodaft.Runtime) -> None:
        self.rt = rt
        self.actors = list(await asyncio.gather(*(rt.spawn(Porter) for _ in range(self.rng.randint(1, 3)))))
        if self.rng.random() < 0.3:
            self.actors.append(await rt.on(with_=self.actors[0]).spawn(Porter))

    async def _client(self) -> None:
        """One channel, from its making to its end."""
        rng = self.rng
        self.channels += 1
        name = self.channels
        Cargo.of[name] = cargo = Cargo(self.world.loop, name)
        with suppress(aiodaft.DaftError):
            await (self._leave_to_one_process(name) if rng.random() < 0.2 else self._use(await self._make(), name))
        self._judge(cargo)

    async def _make(self) -> Channel[Any]:
        maker, capacity = self.rng.choice([*self.actors, None]), self.rng.randint(1, 4)
        return Channel(capacity) if maker is None else await maker.make(capacity)

    async def _leave_to_one_process(self, name: int) -> None:
        """An actor sends to another one in its process, after every other process has dropped the channel."""
        channel, receiver = await self._make(), self.rng.choice(self.actors)
        async with self.rt.on(with_=receiver).spawn(Porter) as sender:
            await sender.keep(channel, name)
            received = receiver.receive(channel, name, 60.0)
            await send(channel, name, 0, 1, 60.0)
            del channel
            await asyncio.sleep(self.rng.random() * 0.02)
            await sender.send_kept(name, self.rng.randint(1, 6))
            await received

    async def _use(self, channel: Channel[Any], name: int) -> None:
        rng = self.rng
        senders = [self._send(channel, name, sender) for sender in range(rng.randint(1, 3))]
        receivers = [self._receive(channel, name) for _ in range(rng.randint(1, 3))]
        everybody = [
            self.world.loop.create_task(one) for one in rng.sample(senders + receivers, len(senders + receivers))
        ]
        sending = [task for task in everybody if task.get_coro() in senders]
        await asyncio.wait(sending)
        await channel.aclose()
        # Items that came back from tasks that gave up, or died.
        await self._tried(receive(channel, name, 60.0))
        await asyncio.wait(everybody)

    async def _send(self, channel: Channel[Any], name: int, sender: int) -> None:
        rng, where = self.rng, self.rng.choice([*self.actors, None])
        count, seconds = rng.randint(0, 12), self._patience()
        await asyncio.sleep(rng.random() * 0.02)
        what = send if where is None else where.send
        await self._tried(what(channel, name, sender, count, seconds))

    async def _receive(self, channel: Channel[Any], name: int) -> None:
        rng, where = self.rng, self.rng.choice([*self.actors, None])
        seconds = self._patience()
        await asyncio.sleep(rng.random() * 0.02)
        what = receive if where is None else where.receive
        await self._tried(what(channel, name, seconds))

    async def _tried(self, what: Any) -> None:
        with suppress(aiodaft.DaftError):
            await what

    def _patience(self) -> float:
        # Mostly about as long as a message takes, so that a task often gives up just when one comes.
        return self.rng.expovariate(self.rng.choice((50, 1000, 1000))) if self.rng.random() < self.cancels else 60.0

    def _judge(self, cargo: Cargo) -> None:
        """Once the channel is over: was each item seen once, and in its place?"""
        seen = [item for _, item in cargo.seen]
        if len(seen) > len(set(seen)):
            self.history.wrong.append(f"channel {cargo.name}: items were received twice: {sorted(seen)}")
        if cargo.refused:
            self.history.wrong.append(f"channel {cargo.name}: nothing could be sent before it was closed")
        if any(what in {"kill", "cut"} for _, _, what, *_ in self.world.loop.trace):
            return
        if missing := sorted(cargo.sent - set(seen)):
            self.history.wrong.append(f"channel {cargo.name}: items were lost: {missing}")
        if cargo.given_up:
            return
        for where in {process for process, _ in cargo.seen}:
            mine = [item for process, item in cargo.seen if process == where]
            if any(
                mine.index(one) > mine.index(other)
                for one in mine
                for other in mine
                if one[0] == other[0] and one < other
            ):
                self.history.wrong.append(f"channel {cargo.name}: items came out of order in {where}: {mine}")


class Impatient(ChannelProgram):
    """Many tasks give up and nothing else goes wrong, so that every item has to arrive."""

    def __init__(self, seed: object) -> None:
        super().__init__(seed)
        self.kills, self.cuts, self.cancels = 0, 0, 0.5
