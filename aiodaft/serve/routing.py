"""The router: sends prompts to engines that prefill and engines that decode, follows them, and moves requests."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from aiodaft.exceptions import DaftError, OutcomeUnknown, Overloaded
from aiodaft.ref import Stream
from aiodaft.serve.engine import PAGE, Engine, Load, Piece, Request

_LOSSES: Final = 3  # of engines, for one prompt
_WORTH: Final = 16  # tokens of work that an engine may have more for each token of a beginning that it knows
_KEYS: Final = 1 << 17  # of an engine, that a router keeps
_AGAIN: Final = 0.1  # seconds until an engine is asked for its load again, if its stream of them ends

Role: TypeAlias = Literal["prefill", "decode", "drained", "gone"]


@dataclass(eq=False)
class Member:
    """The router's view of an engine: its last load (None: it does not run), and the requests sent there since."""

    engine: Engine
    role: Role
    load: Load | None = None
    told: int = 0
    sent: int = 0
    pending: int = 0  # the work of the requests since the last load
    since: dict[object, int] = field(default_factory=dict)
    under_way: set[object] = field(default_factory=set)
    beginnings: dict[bytes, None] = field(default_factory=dict)

    @property
    def work(self) -> int:
        """The tokens that it has to compute."""
        return (self.load.work if self.load else 0) + self.pending

    @property
    def free(self) -> int:
        return (self.load.places if self.load else 0) - len(self.under_way)

    @property
    def process(self) -> object:
        return self.load and self.load.process

    def known(self, request: Request) -> int:
        """The tokens at the beginning of a request that it has in its pages."""
        keys, low, high = request.keys, 0, len(request.keys)
        while low < high:  # a page is known only if those before it are
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] in self.beginnings else (low, middle - 1)
        return low * PAGE

    def take(self, load: Load) -> None:
        self.load, self.told, self.pending = load, self.told + 1, 0
        self.since.clear()
        for key in load.forgotten:
            self.beginnings.pop(key, None)

    def lose(self) -> None:
        self.load, self.pending = None, 0
        self.since.clear()
        self.beginnings.clear()

    @contextmanager
    def sending(self, request: Request, work: int, number: int = 0) -> Generator[None]:
        self.sent, key = number or self.sent, object()
        self.since[key] = work
        self.pending += work
        self.under_way.add(key)
        for page in request.keys:
            self.beginnings.pop(page, None)
            self.beginnings[page] = None
        while len(self.beginnings) > _KEYS:
            del self.beginnings[next(iter(self.beginnings))]
        try:
            yield
        finally:
            self.pending -= self.since.pop(key, 0)
            self.under_way.discard(key)


# The choice of an engine for a request, among at least one.
Policy: TypeAlias = Callable[[Request, Sequence[Member]], Member]


def round_robin(request: Request, members: Sequence[Member]) -> Member:
    """The engine that has waited longest for a request."""
    return min(members, key=lambda member: member.sent)


def least_work(request: Request, members: Sequence[Member]) -> Member:
    """The engine with the fewest tokens to compute."""
    return min(members, key=lambda member: member.work)


def two_choices(request: Request, members: Sequence[Member]) -> Member:
    """The one with less work of two at random: several routers do not choose the same."""
    return least_work(request, random.sample(members, min(2, len(members))))


def prefix_locality(request: Request, members: Sequence[Member]) -> Member:
    """The one that knows most of the beginning, unless it is too busy."""
    return min(members, key=lambda member: member.work - _WORTH * member.known(request))


def sticky(request: Request, members: Sequence[Member]) -> Member:
    """The one of the session, as long as it is there; without a session, as `prefix_locality`."""
    if not request.session:
        return prefix_locality(request, members)
    return max(members, key=lambda member: hash((request.session, id(member))))


class Turns:
    """Deficit-fair turns: tenants that wait get equal numbers of tokens; the requests of one come in their order.

    A request is paid from the credit of its tenant when it begins. When no tenant that waits has credit, all get
    `quantum` (default: all come in their order). So while a request is the first of its tenant, each other tenant gets
    at most 2 * (quantum + the cost of the largest request) tokens. At most `most` requests wait.
    """

    def __init__(self, quantum: float = math.inf, most: int = 256) -> None:
        if not quantum > 0:
            raise ValueError(f"quantum is to be more than 0 tokens, not {quantum}")
        self.quantum, self.most = quantum, most
        self.waiting: list[Request] = []
        self.credit: dict[str, float] = {}

    def enter(self, request: Request) -> None:
        """Begin to wait; raises Overloaded if as many wait as may."""
        if len(self.waiting) >= self.most:
            raise Overloaded(f"{len(self.waiting)} requests wait, as many as may: come back later")
        self.waiting.append(request)
        self.credit.setdefault(request.tenant, 0)

    def next(self) -> Request:
        """The request that is next."""
        while True:
            for request in self.waiting:
                if self.credit[request.tenant] > 0:
                    return request
            tenants = {request.tenant for request in self.waiting}
            rounds = max(1, -max(self.credit[tenant] for tenant in tenants) // self.quantum)
            for tenant in tenants:
                self.credit[tenant] += rounds * self.quantum

    def pay(self, request: Request) -> None:
        """Begin the request."""
        self.credit[request.tenant] -= request.cost

    def leave(self, request: Request) -> None:
        """Wait no more, whether it begins or not."""
        self.waiting.remove(request)
        if not self.waiting:
            self.credit.clear()


class EnginesGone(RuntimeError):
    """No engine that decodes is left, or will be restarted."""


class _Astray(OutcomeUnknown):
    """A request has left its engine, and has not arrived."""


@dataclass(eq=False)
class _Leg:
    """The time of a request at one engine; the next one, or None, is there when it has moved, or has not arrived."""

    member: Member
    request: Request
    stream: Stream[Piece]
    prefilling: ExitStack
    ends: AsyncExitStack
    next: asyncio.Future[_Leg | None] | None = None
    is_over: bool = False

    async def read(self) -> AsyncGenerator[Piece | _Leg]:
        is_leaving = False
        following: _Leg | None = None
        try:
            async with self.ends:
                async for piece in self.stream:
                    self.prefilling.close()
                    is_leaving = not piece.ids
                    if not is_leaving:
                        yield piece  # noqa: ASYNC119 - `_attempt` closes it
            if is_leaving:
                following = None if self.next is None else await self.next
                if following is None:
                    raise _Astray(f"the last piece of {self.member.engine!r} has no tokens: it has no more of the text")
                yield following
        finally:
            self.is_over = True
            late = self.next if following is None else None
            if late and late.done() and not late.cancelled() and (unread := late.result()):
                await unread.ends.aclose()


class Flight:
    """A request under way."""

    def __init__(self, request: Request) -> None:
        self.request, self.leg = request, None
        self.ids: list[int] = []
        self.count = 0

    leg: _Leg | None

    def add(self, piece: Piece) -> None:
        self.ids.extend(piece.ids)
        self.count += piece.size

    def rest(self) -> Request:
        """What is left of it."""
        if self.ids:
            self.request, self.ids, self.count = self.request.after(self.ids, self.count), [], 0
        return self.request

    @property
    def is_complete(self) -> bool:
        ids = self.ids or self.request.tokens[len(self.request.tokens) - self.request.written :]
        return self.count >= self.request.count or (bool(ids) and ids[-1] in self.request.stops)


class Router:
    """Engines with roles. An engine may get another role at any time.

    Args:
        prefill: Engines that prefill. Without one, those that decode do it themselves.
        decode: Engines that decode.
        policies: For each role, the choice of one of its engines.
        turns: The order of the requests.
        by_layer: Whether keys and values go layer by layer, or all at once.
    """

    def __init__(
        self,
        prefill: Iterable[Engine],
        decode: Iterable[Engine],
        policies: Mapping[str, Policy] | None = None,
        turns: Turns | None = None,
        by_layer: bool = False,
    ) -> None:
        self.members = [Member(engine, "prefill") for engine in prefill]
        self.members += [Member(engine, "decode") for engine in decode]
        self.policies: Mapping[str, Policy] = {"prefill": prefix_locality, "decode": two_choices, **(policies or {})}
        self.turns, self.by_layer = turns or Turns(), by_layer
        self.flights: set[Flight] = set()
        self.sent = self.under_way = self.resumed = self.moved = 0
        self.changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._followers: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Router]:
        """The time that it follows its engines; it begins when all of them have told their load."""
        async with asyncio.TaskGroup() as self._tasks:
            for member in self.members:
                self._followers.append(self._tasks.create_task(self._follow(member)))
            try:
                while not all(member.load or member.role == "gone" for member in self.members):
                    await self.changed.wait()
                yield self
            finally:
                for follower in self._followers:
                    follower.cancel()

    def add(self, engine: Engine, role: Role) -> int:
        """Add an engine, in the `running` block; gives its number."""
        if self._tasks is None:
            raise RuntimeError("the router does not run: `async with router.running()`")
        self.members.append(member := Member(engine, role))
        self._followers.append(self._tasks.create_task(self._follow(member)))
        return len(self.members) - 1

    async def _follow(self, member: Member) -> None:
        while member.role != "gone":
            try:
                async for load in member.engine.loads():
                    member.take(load)
                    self._ring()
                await asyncio.sleep(_AGAIN)
            except DaftError as error:
                member.lose()
                if not isinstance(error, OutcomeUnknown) or error.executed is False:  # it is not restarted any more
                    member.role = "gone"
                self._ring()

    def _ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence, if the engines know."""
        known = [member.load.context for member in self.members if member.load and member.load.context]
        return min(known, default=None)

    def assign(self, number: int, role: Role) -> None:
        """Give an engine another role; it completes the requests that it has begun.

        Raises:
            ValueError: It is the last one that decodes, or there is no such role.
        """
        if role not in ("prefill", "decode", "drained"):
            raise ValueError(f"the role of an engine is 'prefill', 'decode' or 'drained', not {role!r}")
        if role != "decode" and self.up("decode") in ([], [self.members[number]]):
            raise ValueError("this is the last engine that decodes")
        self.members[number].role = role
        self._ring()

    async def drain(self, number: int, role: Role = "drained") -> None:
        """Have other engines go on with the requests of an engine; returns when it has none, and the new role.

        Requests that cannot move are completed there.

        Raises:
            ValueError: It is the last one that decodes.
        """
        member = self.members[number]
        self.assign(number, role)
        for flight in [flight for flight in self.flights if flight.leg and flight.leg.member is member]:
            await self.move(flight)
        while member.under_way:
            await self.changed.wait()

    async def move(self, flight: Flight, number: int | None = None) -> bool:
        """Have another engine go on with one of `flights` in the middle of its text; says whether it moved.

        Most of the keys and values are copied while the first engine goes on; then it stops, and the rest follows. If
        an engine dies, the request stays, or goes on as after a death.

        Args:
            flight: The request.
            number: The other engine. Default: the policy chooses.
        """
        here = flight.leg
        others = [member for member in self.up("decode") if not (here and member is here.member)]
        if here is None or here.next is not None or not others:
            return False
        member = self.members[number] if number is not None else self.policies["decode"](here.request, others)
        here.next = arrival = asyncio.get_running_loop().create_future()
        leg = None
        try:
            leg = await self._precopied(here, member)
        except (DaftError, LookupError, NotImplementedError, StopAsyncIteration):
            return False  # it stays, has ended, or goes on as after a death
        finally:
            if leg is None:
                here.next = None
            if not (here.is_over or arrival.done()):
                arrival.set_result(leg)
            elif leg is not None:
                await leg.ends.aclose()
        self.moved += not here.is_over
        return not here.is_over

    async def _precopied(self, here: _Leg, member: Member) -> _Leg:
        name = here.request.name
        async with AsyncExitStack() as ends:
            ends.enter_context(member.sending(here.request, here.request.count))
            first: Any = here.member.engine.give(name)
            stream = member.engine.decode(here.request, first)
            ends.push_async_callback(stream.aclose)
            there = await anext(stream)
            rest = here.member.engine.give(name, there.size, last=True)
            await member.engine.take(name, rest)
            return _Leg(member, here.request, stream, ExitStack(), ends.pop_all())

    async def generate(self, request: Request) -> AsyncGenerator[Piece]:
        """Give the text that follows. When an engine dies, others go on from the tokens that there are.

        Raises:
            Overloaded: As many requests wait as may.
            OutcomeUnknown: It has lost several engines, and may be the cause.
            EnginesGone: All engines that decode are gone for good.

        Cancellation: the end of the generator frees the places of the request.
        """
        async with self._turn(request):
            flight, losses = Flight(request), 0
            self.flights.add(flight)
            try:
                while not flight.is_complete:
                    try:
                        async with aclosing(self._attempt(flight)) as attempt:
                            async for piece in attempt:
                                flight.add(piece)
                                yield piece  # noqa: ASYNC119 - its caller closes it
                        return
                    except OutcomeUnknown:
                        losses += 1
                        if losses > _LOSSES:
                            raise
                        self.resumed += 1
                        await asyncio.sleep(0.05 * losses)  # its loads end at about the same time
            finally:
                self.flights.discard(flight)

    @asynccontextmanager
    async def _turn(self, request: Request) -> AsyncGenerator[None]:
        self.turns.enter(request)
        try:
            while not (self._has_place() and self.turns.next() is request):
                await self.changed.wait()
            self.turns.pay(request)
        finally:
            self.turns.leave(request)
            self._ring()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._ring()

    def _has_place(self) -> bool:
        return self.under_way < sum(member.load.places for member in self.up("decode") if member.load)

    def up(self, role: Role) -> list[Member]:
        """The engines with a role that run."""
        members = [member for member in self.members if member.role == role]
        if role == "decode" and not members:
            raise EnginesGone("all engines that decode are gone for good")
        return [member for member in members if member.load]

    async def _attempt(self, flight: Flight) -> AsyncGenerator[Piece]:
        leg: _Leg | None = await self._begin(flight.rest())
        try:
            while leg is not None:
                flight.leg, following = leg, None
                async with aclosing(leg.read()) as items:
                    async for item in items:
                        if isinstance(item, _Leg):
                            following = item
                        elif flight.is_complete:
                            return  # its engine goes on
                        else:
                            yield item  # noqa: ASYNC119 - `generate` closes it
                leg = following
                self._ring()
        finally:
            flight.leg = None

    async def _begin(self, request: Request) -> _Leg:
        while not (decoders := self.up("decode")):
            await self.changed.wait()
        prefillers = self.up("prefill")
        prefiller = self.policies["prefill"](request, prefillers) if prefillers else None
        beside = [member for member in decoders if prefiller and member.process == prefiller.process]
        decoder = self.policies["decode"](request, beside or decoders)
        self.sent += 1
        async with AsyncExitStack() as ends:
            ends.enter_context(decoder.sending(request, request.count if prefiller else request.cost, self.sent))
            prefilling = ends.enter_context(ExitStack())
            given: Any = None
            layers: list[Any] = []
            if prefiller is not None and prefiller.load is not None:
                prefilling.callback(self._ring)
                prefilling.enter_context(prefiller.sending(request, len(request.tokens), self.sent))
                given = prefiller.engine.prefill(request, self.by_layer)
                numbers = range(prefiller.load.layers if self.by_layer else 0)
                layers = [prefiller.engine.layer(request.name, number) for number in numbers]
                for ref in (given, *layers):
                    prefilling.callback(ref.cancel)
            # Keys and values go from engine to engine.
            stream = (
                decoder.engine.decode(request, given, layers) if given is not None else decoder.engine.decode(request)
            )
            ends.push_async_callback(stream.aclose)
            return _Leg(decoder, request, stream, prefilling, ends.pop_all())
