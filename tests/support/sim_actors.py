"""Actors of simulations, and an onlooker's record of every call: the times of its making, beginning and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from simulated import SimulatedLoop

import aiodaft
from aiodaft import Actor, Ref, method
from aiodaft.actor import target_of


class Boom(Exception):
    """The error of a method, with the number of its call."""


def value_of(call: int, size: int) -> Any:
    """The result of a call: plain, encoded, or large enough to stay with its producer."""
    return (call * 7, [call, "x" * 50], [call, b"%d" % call * 20_000])[size]


@dataclass(frozen=True)
class Outcome:
    """The end of a call for its waiter, without anything that would keep the call's objects alive."""

    kind: str
    executed: bool | None
    # Of a value: whether it is the right one. Of the method's own exception: whether it is that of this very call.
    own: bool
    text: str


@dataclass
class Call:
    """One call, as the onlooker knows it."""

    number: int
    caller: str
    actor: str
    size: int
    ordered: bool
    began: int = 0
    outcome: Outcome | None = None


class History:
    """All events, in all processes; also the faults among them."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.calls: list[Call] = []
        self.wrong: list[str] = []
        # Of each caller, actor and process of the actor, the ordered call that began last.
        self._last: dict[tuple[str, str, str], int] = {}
        # The processes that each actor has lived in, the latest one last.
        self._homes: dict[str, list[str]] = {}
        # Whether an earlier incarnation may still run, on a host that is cut off.
        self.apart = False

    def made(self, handle: Any, size: int = 0, *, ordered: bool = True) -> int:
        """A call is about to be made."""
        call = Call(len(self.calls), self.loop.current.name, target_of(handle).label, size, ordered)
        self.calls.append(call)
        return call.number

    def began(self, number: int) -> None:
        """The first line of the method runs."""
        call = self.calls[number]
        self.loop.note("began", number)
        call.began += 1
        if call.began > 1:
            self.wrong.append(f"call {number} ran {call.began} times")
        home, homes = self.loop.current.name, self._homes.setdefault(call.actor, [])
        if home not in homes:
            homes.append(home)
        elif home != homes[-1] and not self.apart:
            self.wrong.append(f"call {number} ran in an earlier incarnation of its actor")
        if call.ordered:
            last = self._last.get((call.caller, call.actor, home), -1)
            if last > number:
                self.wrong.append(f"call {number} began after call {last}, which was made later")
            self._last[call.caller, call.actor, home] = number

    async def settle(self, number: int, ref: Ref[Any]) -> Any:
        """Wait for a call, and remember how it ended."""
        try:
            value = await ref
        except Exception as error:
            own = isinstance(error, Boom) and error.args == (number,)
            executed = getattr(error, "executed", None)
            self._ended(number, Outcome(type(error).__name__, executed, own, f"{error!r:.200}"))
            raise
        right = value == value_of(number, self.calls[number].size)
        self._ended(number, Outcome("value", True, right, f"{value!r:.80}"))
        return value

    def _ended(self, number: int, outcome: Outcome) -> None:
        if self.loop.is_closed():
            # The simulation is over, and code in the middle of anything is closed.
            return
        call = self.calls[number]
        self.loop.note("ended", number, outcome.kind, outcome.executed)
        if call.outcome not in (None, outcome):
            self.wrong.append(f"call {number} ended twice: {call.outcome}, {outcome}")
        call.outcome = outcome

    def judge(self) -> None:
        """Once nothing happens any more: does what callers were told fit what ran?"""
        for call in self.calls:
            if call.outcome is not None:
                found = self._judge(call, call.outcome, bool(call.began))
                self.wrong += [f"call {call.number} {found}: {call.outcome}"] if found else []

    def _judge(self, call: Call, outcome: Outcome, ran: bool) -> str:
        if outcome.kind == "value":
            return "" if ran and outcome.own else "gave a wrong value"
        if outcome.kind == "Boom":
            return "" if ran is outcome.own else f"got an error that the method did not raise (ran: {ran})"
        if outcome.kind not in _EXPECTED:
            return "failed as it never should"
        return "" if outcome.executed in (None, ran) else f"does not say whether it ran: it did{'' if ran else ' not'}"


_EXPECTED: Final = {
    "ActorDied", "CallCancelled", "DeadlineExceeded", "LeaseLost", "OwnerDied", "PeerLost", "RestartLimitReached",
    "RuntimeClosed", "SerializationError", "StaleHandle",
}  # fmt: skip


class Onlooker:
    """Gives actors the history of the simulation that they live in."""

    history: History


def began(call: int) -> None:
    Onlooker.history.began(call)


class Subject(Actor):
    """Does a bit of everything, and says when each call begins."""

    def __init__(self) -> None:
        self.kept: list[Ref[Any]] = []

    @method
    async def nap(self, call: int, size: int, seconds: float) -> Any:
        began(call)
        await asyncio.sleep(seconds)
        return value_of(call, size)

    @method
    async def at_once(self, call: int, size: int) -> Any:
        began(call)
        return value_of(call, size)

    @method
    def compute(self, call: int, size: int) -> Any:
        began(call)
        return value_of(call, size)

    @method(ordered=False)
    async def aside(self, call: int, size: int, seconds: float) -> Any:
        began(call)
        await asyncio.sleep(seconds)
        return value_of(call, size)

    @method(concurrency=1)
    async def narrow(self, call: int, size: int, seconds: float) -> Any:
        began(call)
        await asyncio.sleep(seconds)
        return value_of(call, size)

    @method
    async def fail(self, call: int, seconds: float) -> Any:
        began(call)
        await asyncio.sleep(seconds)
        raise Boom(call)

    @method
    def fail_on_thread(self, call: int) -> Any:
        began(call)
        raise Boom(call)

    @method
    async def fail_to_encode(self, call: int) -> Any:
        began(call)
        return (nothing for nothing in ())

    @method
    async def stubborn(self, call: int, size: int, seconds: float) -> Any:
        began(call)
        until = asyncio.get_running_loop().time() + seconds
        while (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                continue
        return value_of(call, size)

    @method
    async def combine(self, call: int, size: int, *parts: Any) -> Any:
        began(call)
        return value_of(call, size)

    @method
    def combine_on_thread(self, call: int, size: int, *parts: Any) -> Any:
        began(call)
        return value_of(call, size)

    @method
    async def keep(self, call: int, size: int, box: Any) -> Any:
        """Hold a ref that comes inside an object; look at it; drop it with the next one."""
        began(call)
        self.kept = [box.ref]
        return value_of(call, size)

    @method
    async def drop(self) -> None:
        self.kept.clear()

    @method
    async def look(self, call: int, size: int) -> Any:
        began(call)
        for ref in self.kept:
            # With any outcome.
            with suppress(Exception):
                await ref
        return value_of(call, size)

    @method
    async def relay(self, call: int, size: int, other: Subject, seconds: float) -> Any:
        """Call another actor; its error is that of this call too."""
        began(call)
        history = Onlooker.history
        inner = history.made(other, 1)
        try:
            await history.settle(inner, other.nap(inner, 1, seconds))
        except Boom as error:
            raise Boom(call) from error
        return value_of(call, size)

    @method
    async def pair(self, call: int, size: int, other: Subject, neighbour: Subject, seconds: float) -> Any:
        """Call another actor, and give its coming result to a third one."""
        began(call)
        history = Onlooker.history
        first = history.made(other, 2)
        wanted = other.nap(first, 2, seconds)
        second = history.made(neighbour, 1)
        combined = neighbour.combine(second, 1, wanted)
        made = (history.settle(first, wanted), history.settle(second, combined))
        for outcome in await asyncio.gather(*made, return_exceptions=True):
            if isinstance(outcome, aiodaft.DaftError):
                raise outcome
        return value_of(call, size)

    @method
    async def items(self, call: int, count: int) -> AsyncIterator[Any]:
        began(call)
        for index in range(count):
            yield value_of(index, index % 3)
            await asyncio.sleep(0.001)

    @method
    async def make(self, size: int) -> bytes:
        return bytes(size)

    @method
    async def length(self, data: bytes) -> int:
        return len(data)

    @method
    async def leave(self, call: int) -> None:
        began(call)
        raise SystemExit(3)


class Box:
    """An object with a ref in it, which travels as a ref."""

    def __init__(self, ref: Ref[Any]) -> None:
        self.ref = ref
