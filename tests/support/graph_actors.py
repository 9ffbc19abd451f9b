"""Actors for compiled graphs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors import WithGate
from here import current_peer

import aiodaft
from aiodaft import Ref, method
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.graphs.participant import Participant, ParticipantRun
from aiodaft._runtime.graphs.strand_call import StrandCall
from aiodaft.exceptions import RemoteProtocolError


@dataclass
class Box:
    """A container."""

    content: Any


class Node(WithGate):
    """Computes, remembers its steps, and fails when told to."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.log: list[Any] = []
        self.total = 0

    @method
    async def on_loop(self, *values: Any) -> Any:
        return self._mix("loop", values)

    @method
    def on_thread(self, *values: Any) -> Any:
        return self._mix("thread", values)

    @method(concurrency=1)
    async def one_at_a_time(self, *values: Any) -> Any:
        await asyncio.sleep(0)
        return self._mix("one", values)

    @method
    async def spoil(self, value: Any) -> Any:
        """Changes its argument, which no other actor may have."""
        if isinstance(value, list):
            value.append("spoilt")
        return value

    def _mix(self, kind: str, values: tuple[Any, ...]) -> Any:
        if any(value == 13 for value in values):
            raise ValueError(f"{self.name} does not take 13")
        self.total += 1
        numbers = [value if isinstance(value, int) else len(str(value)) for value in values]
        number = (sum(numbers) * 7 + len(numbers)) % 17
        return number if number % 3 else [kind, number, *numbers]

    @method
    async def note(self, entry: Any) -> None:
        self.log.append(entry)

    @method
    async def notes(self) -> list[Any]:
        return self.log

    @method
    async def mark(self, entry: tuple[int, Any]) -> tuple[int, Any]:
        """Notes the number that comes with a value of any size."""
        self.log.append(entry[0])
        return entry

    @method
    async def same(self, value: Any = None) -> Any:
        return value

    @method
    async def boxed(self, value: Any) -> Any:
        """A ref of this process, inside a result."""
        return Box(Ref(current_peer().refs.put(value, "boxed")))

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def collect_garbage(self, *, by_itself: bool) -> None:
        gc.collect()
        _ = gc.enable() if by_itself else gc.disable()

    @method
    async def graph_objects(self) -> int:
        """The objects of graphs in this process, also those in no table."""
        return sum(isinstance(found, Participant | ParticipantRun | StrandCall) for found in gc.get_objects())

    @method
    async def keep(self, ref: Box) -> Any:
        return ref.content

    @method
    async def wait(self, value: Any = None) -> Any:
        await self.gate.wait()
        return value

    @method(ordered=False)
    async def wait_outside(self) -> None:
        """As `wait`, outside the order of calls."""
        await self.gate.wait()

    @method
    async def wait_though_cancelled(self, value: Any) -> Any:
        with suppress(asyncio.CancelledError):
            await self.gate.wait()
        return value

    @method(ordered=False)
    async def break_with(self, process: PeerId) -> None:
        """Ends the connection to the process of another actor."""
        current_peer().connections.to(process).close(RemoteProtocolError("it broke"))

    @method
    async def die(self, value: Any) -> Any:
        if value == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    @method
    async def words(self, text: str) -> Any:
        for word in text.split():
            yield word

    @method
    async def compile_with(self, other: Node, value: int) -> list[Any]:
        """A graph of a worker's own, over itself and another actor."""

        def flow(x: aiodaft.Ref[int]) -> aiodaft.Ref[int]:
            return other.on_loop(x)

        async with aiodaft.compile(flow) as graph:
            return [await graph(value), await graph(value + 1)]

    @method
    async def outlives(self, other: Node, deaths: int, *, beside: bool = False) -> list[bool]:
        """A graph of this actor's own, over one that is restarted, works again after every death of it.

        With `beside`, it has a step of a collective there as well.
        """
        # So that this process knows where it is.
        await other.same()
        worked: list[bool] = []

        def flow(x: aiodaft.Ref[str]) -> aiodaft.Ref[Any]:
            found = other.die(x)
            return aiodaft.broadcast(found, [other])[0] if beside else found

        async with aiodaft.compile(flow) as graph:
            for _ in range(deaths):
                try:
                    await graph("die")
                except aiodaft.ActorDied:
                    worked.append(await graph("good") == "good")
        return worked

    @method
    async def run_and_call(self, beside: Node) -> list[Any]:
        """A run of a graph over an actor of this process, between two calls of that actor."""
        async with aiodaft.compile(lambda x: beside.mark(x)) as graph:
            await asyncio.gather(beside.mark((0, None)), graph((1, None)), beside.mark((2, None)))
        return await beside.notes()

    @method
    async def run_for_ever(self, other: Node) -> None:
        """Has a run under way in another actor that never ends by itself."""

        def flow(x: aiodaft.Ref[bytes]) -> aiodaft.Ref[Any]:
            return other.wait(other.same(x))

        async with aiodaft.compile(flow) as graph:
            await graph(b"x" * 300_000)

    @method(ordered=False)
    async def state(self) -> tuple[int, int, int]:
        """Plans here, runs under way, bytes kept for others."""
        peer = current_peer()
        participants = peer.graphs.participants.values()
        return len(participants), sum(len(share.runs) for share in participants), peer.store.stored_bytes()
