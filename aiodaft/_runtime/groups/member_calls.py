"""Calls of the members of a group: which one is called next, and calls that are made together, or not at all."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import suppress
from functools import partial
from itertools import count, islice, repeat
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias, TypeGuard, cast

from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.groups.turns import runs_in_turn
from aiodaft._protocol.ids import KEYED, NOBODY, CallId, roster_at, sibling_ids
from aiodaft._protocol.node.worker import Health
from aiodaft._runtime.calls.call import CallState, Request, Target
from aiodaft._runtime.calls.following import FollowingCall, FollowingTarget, followed
from aiodaft._runtime.calls.outgoing import Backlog
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.serialization.errors import failed_beside
from aiodaft.actor import CallTarget
from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.methods import MethodSpec
from aiodaft.policies import Load, Policy
from aiodaft.ref import Ref, Refs, Stream

# The calls of one call of a group: they meet in collectives, and when one fails, the others do not wait for it. Only
# the caller knows of all of them: it tells the others that one has failed.

_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5

Say: TypeAlias = Callable[[Keyed, CallId], Ref[bool]]


def sibling_numbers(first: CallTarget, count: int, roster: int = 0) -> Iterator[CallId | None]:
    return iter(sibling_ids(cast("Target", first).caller.next_number(), count, roster))


def join_siblings(refs: Sequence[Ref[Any]]) -> None:
    states = [state for state in map(state_of, refs) if isinstance(state, CallState)]
    if len(states) > 1:
        siblings = Siblings(states)
        for state in states:
            state.siblings = siblings
            state.watch(siblings.over)


class Siblings:
    def __init__(self, states: Sequence[CallState]) -> None:
        # Results that nobody holds any more are freed.
        self._calls = list(map(weakref.ref, states))
        self.failed: DaftError | None = None
        # The members whose calls have returned, and the label of the calls; and the calls that were made again.
        self._ended: dict[Hashable, str] = {}
        self._again: list[weakref.ref[CallState]] = []

    def over(self, state: CallState) -> None:
        if self.failed is not None:
            return
        error = state.error
        if error is None:
            self._ended[followed(state.target).identity] = state.origin
            self._tell(self._again, self._say_who_ended)
            return
        # Deaths are told as they are.
        self.failed = error if isinstance(error, OutcomeUnknown) else failed_beside(state.origin, error)
        self._tell(self._calls, self._say_why)

    def made_again(self, state: CallState) -> None:
        """A call is made again. Those that have returned do not come to its collectives."""
        self._again.append(weakref.ref(state))
        if self._ended:
            self._tell(self._again[-1:], self._say_who_ended)

    def _tell(self, calls: Sequence[weakref.ref[CallState]], say: Say) -> None:
        for reference in calls:
            if (call := reference()) is not None and not call.settled:
                telling = self._tell_one(reference, say)
                call.process.tasks.create_task(telling, name="tell the member of a group what became of another")

    async def _tell_one(self, reference: weakref.ref[CallState], say: Say) -> None:
        pause = _PAUSE
        while (call := reference()) is not None and not call.settled:
            target = call.target
            if self.failed is not None and isinstance(target, FollowingTarget) and target.is_down:
                # Its next incarnation would begin collectives that the others have given up.
                call.cancel(str(self.failed))
                return
            if not _waits_here(call):
                keyed: Keyed = target.caller.handle(
                    call.producer, KEYED, f"keyed collectives of {call.producer}", Keyed
                )
                # If the process is gone, the call ends, or goes to another one.
                with suppress(DaftError):
                    if await say(keyed, call.number):
                        return
            del call
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _say_why(self, keyed: Keyed, number: CallId) -> Ref[bool]:
        assert self.failed is not None
        return keyed.beside_failed(number, self.failed)

    def _say_who_ended(self, keyed: Keyed, number: CallId) -> Ref[bool]:
        return keyed.beside_ended(number, self._ended)


def _waits_here(call: CallState) -> bool:
    if call.connection is not None:
        return call.connection.session.is_waiting(call.number)
    return call.objects.owner.running_call(call.process.id, call.number) is None


# The numbers of calls that do not belong together.
_ALONE: Final[Iterator[CallId | None]] = repeat(None)


class Unit(NamedTuple):
    """Members that are called as one."""

    rank: int
    target: CallTarget
    others: tuple[CallTarget, ...]

    def health(self) -> int:
        health = self.target.health().value
        return max(health, *(other.health().value for other in self.others)) if self.others else health


class MemberCalls:
    """Makes the calls of one group, also by its views, in any thread; knows which are under way."""

    def __init__(self) -> None:
        self._under_way: dict[CallTarget, set[Any]] = {}
        self._turns = count()

    def forget(self, member: CallTarget) -> set[Any]:
        return self._under_way.pop(member, set())

    def begin(self, member: CallTarget, call: Any) -> None:
        under_way = self._under_way.setdefault(member, set())
        under_way.add(call)
        call.watch(under_way.discard)

    def of(self, member: CallTarget) -> Collection[Any]:
        return self._under_way.get(member, ())

    def under_way(self, member: CallTarget) -> int:
        return len(self.of(member))

    def choose(self, units: list[Unit], policy: Policy, full: Collection[CallTarget]) -> Unit:
        turn = next(self._turns) % len(units)
        turned = units[turn:] + units[:turn]
        health = [unit.health() for unit in turned]
        free = [unit for unit, seen in zip(turned, health, strict=True) if seen == min(health)]
        free = [unit for unit in free if unit.target not in full] or free
        return free[policy(self.loads(free))]

    def loads(self, units: Iterable[Unit]) -> list[Load]:
        under_way = self._under_way
        return [Load(unit.rank, len(under_way.get(unit.target, ())), unit.target.distance()) for unit in units]

    def call_all(
        self,
        calls: Sequence[tuple[Unit, tuple[Any, ...]]],
        spec: MethodSpec,
        kwargs: dict[str, Any],
        roster: Roster[Any] | None,
    ) -> Refs[Any]:
        """Call several units, with their arguments; `roster`: of their group, if its members meet in collectives."""
        each = [(target, args) for unit, args in calls for target in (unit.target, *unit.others)]
        numbers = _ALONE
        if calls and roster is not None:
            in_turn = runs_in_turn(spec.rules) and len(each) == roster.size > 1
            numbers = sibling_numbers(each[0][0], len(each), roster_at(roster.epoch) if in_turn else 0)
        refs = self._make(each, spec, kwargs, numbers)
        join_siblings(refs)
        made = iter(refs)
        units = [list(islice(made, 1 + len(unit.others))) for unit, _ in calls]
        return Refs([first for first, *_ in units], [other for _, *others in units for other in others])

    def call(self, unit: Unit, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        targets = (unit.target, *unit.others)
        numbers = sibling_numbers(unit.target, len(targets)) if unit.others else _ALONE
        ref, *others = self._make([(target, args) for target in targets], spec, kwargs, numbers)
        if others:
            # Until then, they are held: an error that no code sees goes to the scope when the ref is dropped.
            ref._state.watch(partial(_end_others, others))
            join_siblings([ref, *others])
        return ref

    def stream(self, unit: Unit, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        if unit.others:
            raise TypeError(f"{spec.label} is a stream, which only one member can give: call it on that one")
        stream = unit.target.stream(spec, args, kwargs)
        self.begin(unit.target, stream._backend)
        return stream

    def _make(
        self,
        calls: Iterable[tuple[CallTarget, tuple[Any, ...]]],
        spec: MethodSpec,
        kwargs: dict[str, Any],
        numbers: Iterator[CallId | None],
    ) -> list[Ref[Any]]:
        """Make calls that belong together: all of them or none, because members may wait for each other."""
        refs: list[Ref[Any]] = []
        try:
            for target, args in calls:
                refs.append(target.call(spec, args, kwargs, next(numbers)))
                self.begin(target, refs[-1]._state)
        except BaseException:
            _take_back(refs)
            raise
        return refs


def _end_others(others: list[Ref[Any]], state: Any) -> None:
    if state.error is not None:
        _take_back(others)


def _take_back(refs: Iterable[Ref[Any]]) -> None:
    for ref in refs:
        ref._state.mark_seen()
        ref.cancel()


class TaskQueue(Target):
    """The members of a pool as one target of calls; `room`: tasks that a member may have under way."""

    __slots__ = ("_awaited", "_backlog", "_calls", "_members", "_room", "ended")

    def __init__(
        self, label: str, like: Target, members: Callable[[], Sequence[Unit]], calls: MemberCalls, room: int
    ) -> None:
        super().__init__(like.caller, like.caller.process.id, NOBODY, label, like.sink)
        self._backlog = Backlog(like.caller, label)
        self._members = members
        self._calls = calls
        self._room = room
        self._awaited: set[FollowingTarget] = set()
        # As of a `FollowingTarget`: a call that waits here is the call of a member later.
        self.ended = None

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], number: CallId | None = None
    ) -> Ref[Any]:
        state = FollowingCall(self, spec, self.caller.next_number() if number is None else number)
        request = state.request = Request(self, spec, args, kwargs, state.number, WANT_REPLY, state)
        request.again = True
        self.caller.outgoing.submit(request)
        return Ref(state)

    def missed(self, request: Request, connection: Connection | None) -> None:
        """Let a task wait, with its arguments as they are now."""
        if self._backlog.admit(request):
            self.hand_out()

    def forget(self, number: CallId) -> None:
        self._backlog.forget(number)

    def hand_out(self) -> None:
        while self._backlog and (target := self._free_member()) is not None:
            request = self._backlog.take_first()
            if request is None:
                continue
            state = request.state
            assert isinstance(state, FollowingCall)
            state.target = request.target = target
            self._calls.begin(target, state)
            state.watch(lambda _: self.hand_out())
            self.caller.sender.submit_later(request)
        if self._backlog:
            for unit in self._members():
                self._await_restart(unit.target)

    def _await_restart(self, member: CallTarget) -> None:
        if isinstance(member, FollowingTarget) and member.is_down and member not in self._awaited:
            self._awaited.add(member)
            self.process.tasks.create_task(self._arrives(member), name=f"wait for {member.label}")

    async def _arrives(self, member: FollowingTarget) -> None:
        try:
            with suppress(DaftError):
                await member.arrive()
        finally:
            self._awaited.discard(member)
        self.hand_out()

    def _free_member(self) -> Target | None:
        """The member with the fewest tasks, rather one that is up."""
        members = [unit.target for unit in self._members()]
        up = [target for target in members if target.health() is Health.ALIVE]
        found = min(up or members, key=self._calls.under_way, default=None)
        if found is None or self._calls.under_way(found) >= self._room:
            return None
        assert isinstance(found, Target)
        return found


# One `Group.map`: its calls under way, and the results that the loop has not taken yet.

# Untaken results: their number per member, and the bytes of large ones.
_RESULTS: Final = 64
_RESULT_BYTES: Final = 256 << 20


def is_asynchronous(items: Iterable[Any] | AsyncIterable[Any]) -> TypeGuard[AsyncIterable[Any]]:
    return isinstance(items, AsyncIterable) and not isinstance(items, Refs)


class GroupMap:
    """The calls of one map.

    Args:
        items: The first argument of each call; also asynchronous.
        choose: Gives the unit to call next; told which targets have no room.
        window: Calls that a unit may have under way.
        keeps_on: Whether the error of a call is a result as any other.
    """

    def __init__(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        choose: Callable[[Collection[CallTarget]], Unit],
        call: Callable[[Unit, Any], Ref[Any]],
        count: Callable[[], int],
        window: int,
        *,
        keeps_on: bool,
    ) -> None:
        self._items = aiter(items) if is_asynchronous(items) else iter(cast("Iterable[Any]", items))
        self._choose = choose
        self._call = call
        self._count = count
        self._window = window
        self._keeps_on = keeps_on
        self._open = True
        self._failure: Exception | None = None
        self._asking: asyncio.Task[Any] | None = None
        # By the numbers of items: calls, or why they could not be made, with untaken results; and those that are over,
        # in the order in which they ended.
        self._calls: dict[int, Ref[Any] | Exception] = {}
        self._over: dict[int, None] = {}
        self._numbers = itertools.count()
        self._under_way: Counter[CallTarget] = Counter()
        self._full: set[CallTarget] = set()
        self._stored_bytes = 0
        self._news = asyncio.Event()

    def results(self, label: str, *, ordered: bool) -> MapResults:
        return MapResults(label, self._results(ordered=ordered))

    async def _results(self, *, ordered: bool) -> AsyncGenerator[Any, None]:
        try:
            while True:
                self._begin_calls()
                if not self._calls and not self._open:
                    break
                number = next(iter(self._over if self._over and not ordered else self._calls), None)
                if number in self._over:
                    yield await self._result_of(self._calls[number])
                    self._taken(number)
                else:
                    self._news.clear()
                    await self._news.wait()
            if self._failure is not None:
                raise self._failure
        finally:
            for ref in self._calls.values():
                if isinstance(ref, Ref):
                    ref._state.mark_seen()
                    ref.cancel()
            if self._asking is not None:
                self._asking.cancel()
                await asyncio.wait([self._asking])

    async def _result_of(self, call: Ref[Any] | Exception) -> Any:
        if isinstance(call, Exception):
            return call
        try:
            return await call
        except Exception as error:
            if self._keeps_on:
                return error
            raise

    def _begin_calls(self) -> None:
        most = _RESULTS * max(1, self._count())
        while self._open and len(self._over) < most and self._stored_bytes < _RESULT_BYTES:
            unit = self._choose(self._full)
            if unit.target in self._full or not self._has_item(unit):
                return
            try:
                item = self._next_item()
            except (StopIteration, StopAsyncIteration):
                self._open = False
                return
            except Exception as error:  # noqa: BLE001 - raised in the place of this item's result
                self._open, self._failure = False, error
                return
            self._begin(unit, item)

    def _has_item(self, unit: Unit) -> bool:
        if isinstance(self._items, Iterator):
            return True
        if self._asking is None:
            tasks = cast("Target", unit.target).process.tasks
            self._asking = tasks.start_ahead(_next_of(self._items), name="the next item of a map")
            self._asking.add_done_callback(lambda _: self._news.set())
        return self._asking.done()

    def _next_item(self) -> Any:
        if self._asking is None:
            return next(cast("Iterator[Any]", self._items))
        asked, self._asking = self._asking, None
        if asked.cancelled():
            raise RuntimeError("the items of a map were cancelled")
        return asked.result()

    def _begin(self, unit: Unit, item: Any) -> None:
        number = next(self._numbers)
        try:
            ref = self._call(unit, item)
        except Exception as error:  # noqa: BLE001 - given or raised in the place of this item's result
            if self._keeps_on:
                self._calls[number] = error
                self._over[number] = None
            else:
                self._open, self._failure = False, error
            return
        self._calls[number] = ref
        self._under_way[unit.target] += 1
        if self._under_way[unit.target] == self._window:
            self._full.add(unit.target)
        ref._state.watch(partial(self._ended, number, ref, unit.target))

    def _ended(self, number: int, ref: Ref[Any], target: CallTarget, _: object) -> None:
        self._under_way[target] -= 1
        self._full.discard(target)
        self._stored_bytes += ref._state.stored_bytes
        self._over[number] = None
        if ref._state.error is not None and not self._keeps_on:
            self._open = False
        self._news.set()

    def _taken(self, number: int) -> None:
        del self._over[number]
        ref = self._calls.pop(number)
        if isinstance(ref, Ref):
            self._stored_bytes -= ref._state.stored_bytes


async def _next_of(items: AsyncIterator[Any]) -> Any:
    return await anext(items)


class MapResults(AsyncGenerator[Any, None]):
    """The result of `Group.map`: an async generator, which says so where it is used as something else."""

    def __init__(self, label: str, results: AsyncGenerator[Any, None]) -> None:
        self._label = label
        self._results = results

    def __anext__(self) -> Any:
        return self._results.__anext__()

    def asend(self, value: None, /) -> Any:
        return self._results.asend(value)

    def athrow(self, error: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Any:
        return self._results.athrow(error, value, traceback)

    def aclose(self) -> Any:
        return self._results.aclose()

    def __repr__(self) -> str:
        return f"<results of map({self._label})>"

    if not TYPE_CHECKING:

        def __await__(self) -> NoReturn:
            raise TypeError(f"{self!r} are many values: use `async for`, not `await`")

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{self!r} are asynchronous: use `async for`")
