"""Groups: actors of one class with ranks, called together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar, overload

from aiodaft._protocol.groups.axes import Axes
from aiodaft._protocol.groups.roster import Roster
from aiodaft._runtime.serialization.building import builder
from aiodaft.actor import CallTarget, target_of
from aiodaft.methods import MethodSpec, Sig, StreamSig, specs_of
from aiodaft.ref import Ref, Refs, Stream

__all__ = ["Group"]

P = ParamSpec("P")
P1 = ParamSpec("P1")
R = TypeVar("R")
A0 = TypeVar("A0")
ActorT = TypeVar("ActorT")

# Items of `each` and `map`: values, or the results of an earlier call of a group.
Items: TypeAlias = Iterable[A0] | Refs[A0]

# Calls per member that `map` has under way: the next argument travels while the member works.
_UNDER_WAY: Final = 2
# Untaken results of `map`: their number per member, and the bytes of large ones.
_RESULTS: Final = 64
_RESULT_BYTES: Final = 256 << 20
_NO_CALLS: Final[Mapping[CallTarget, int]] = {}


class MembersOwner(Protocol):
    """Makes, tells and stops the members of a group, in the process that owns them."""

    async def grow(self, wanted: Roster[Any]) -> list[Any]: ...
    def tell(self, roster: Roster[Any], handles: list[Any]) -> Awaitable[object]: ...
    async def shrink(self, surplus: list[Any]) -> None: ...


@builder
class Group(Generic[ActorT]):
    """Actors of one class, numbered by rank.

    Methods are named by the class, `group.all(Model.step, batch)`, so that calls stay typed. An index gives a member,
    a slice a group of some of them, which does not own them.
    """

    def __init__(
        self,
        roster: Roster[Any],
        cls: type,
        owner: MembersOwner | None = None,
    ) -> None:
        # With the handles of the members.
        self._roster = roster
        self._class = cls
        self._owner = owner
        # Also of those that no member came to be in: no two changes have the same.
        self._last_epoch = roster.epoch
        self._resizing = asyncio.Lock()
        # Calls of this group that are under way, by member. Threads add to it.
        self._under_way: dict[CallTarget, set[Any]] = {}
        self._turn = 0

    @overload
    def all(self, m: Sig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Refs[R]: ...
    @overload
    def all(self, m: Sig[Concatenate[A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Refs[R]: ...
    def all(self, m: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every member with the same arguments; a ref argument goes to every member."""
        spec = self._spec(m)
        return Refs([self._call(target, spec, args, kwargs) for target in self._targets()])

    def each(self, m: Sig[Concatenate[A0, P1], R], a0: Items[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Refs[R]:
        """Call a method of every member, with one item each as its first argument.

        Raises:
            ValueError: The number of items differs from that of members; no call was made.
        """
        spec = self._spec(m)
        items = list(a0)
        if len(items) != len(self._roster.members):
            raise ValueError(f"{spec.label}: {len(items)} items for {len(self._roster.members)} members")
        pairs = zip(self._targets(), items, strict=True)
        return Refs([self._call(target, spec, (item, *args), kwargs) for target, item in pairs])

    @overload
    def any(self, m: Sig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def any(self, m: Sig[Concatenate[A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Ref[R]: ...
    @overload
    def any(self, m: StreamSig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...
    def any(self, m: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the member with the fewest calls of this group under way, in turn among equals.

        Members that are dead, restarting or silent are left out, as far as this process knows (the controller knows all
        of them; another process learns of a death from its own connection or call). If no other member is left, the
        call waits for one that restarts or is silent; if all are dead, the ref fails at once with the `ActorDied` of
        one of them.

        Raises:
            ValueError: The group has no members.
        """
        spec = self._spec(m, streams=True)
        target = self._freest()
        if spec.is_stream:
            stream = target.stream(spec, args, kwargs)
            under_way = self._under_way.setdefault(target, set())
            under_way.add(stream._backend)
            stream.when_over(under_way.discard)
            return stream
        return self._call(target, spec, args, kwargs)

    @overload
    def map(
        self, m: Sig[Concatenate[A0, P1], R], items: Items[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> AsyncGenerator[R, None]: ...
    # A keyword besides a ParamSpec cannot be typed: here only the items are checked.
    @overload
    def map(
        self, m: Sig[Concatenate[A0, ...], R], items: Items[A0], /, *args: Any, ordered: bool, **kwargs: Any
    ) -> AsyncGenerator[R, None]: ...
    def map(self, m: Any, items: Any, /, *args: Any, ordered: bool = True, **kwargs: Any) -> Any:  # type: ignore[misc]  # a ParamSpec may have that keyword
        """Call a method with each item, on members as they become free; `async for` gives the results.

        A member has at most two calls of this map under way: it works on one while the arguments of the next travel.
        Members are left out as by `any`. At most 64 untaken results per member, and 256 MiB of results over 64 KiB,
        wait for the loop; until it takes some, no call is made.

        Args:
            m: The method.
            items: The first argument of each call; taken as members become free.
            args: The other arguments, the same for each call.
            ordered: Whether results come in the order of the items; False gives each as soon as it exists.
            kwargs: The other arguments, by keyword.

        Raises:
            Exception: What a call or `items` raised, in the place of the result. After an error no items are taken; the
                results before it are given, and the calls after it are cancelled.
            ValueError: The group has no members.

        Cancellation: the calls under way are cancelled, as they are when the loop is left. If you leave the loop early
        while a name still refers to the iterator, use `contextlib.aclosing`.
        """
        return _Map(self, self._spec(m), iter(items), args, kwargs).results(ordered=ordered)

    @property
    def id(self) -> str:
        """The name of the group, unique in the cluster; its members know it, too."""
        return self._roster.id

    @property
    def epoch(self) -> int:
        """Counts the changes of the members, from 1."""
        return self._roster.epoch

    @property
    def axes(self) -> Mapping[str, int]:
        """The names and sizes of the axes; empty if the group has none. The last axis changes fastest with the rank."""
        return self._roster.axes.sizes

    async def resize(self, n: int, *, axes: Mapping[str, int] | None = None) -> None:
        """Resize the group to n members: spawn new ones like the first, or stop the last ranks.

        The group gets a new epoch. The other members know of it when this returns, and before any later call of this
        process: see `current_group`. A member that is restarted meanwhile knows it when it is up.

        Args:
            n: The number of members.
            axes: The new sizes of the axes. Default: the first one changes, and members keep their places.

        Raises:
            TypeError: The group is a slice of another, or came from another process.
            ValueError: The axes do not fit the number.
            InsufficientResources: There are not enough resources; the group stays as it is.

        Cancellation: new members are taken back, and the group stays as it is; members to be stopped are killed.
        """
        owner = self._owner
        if owner is None:
            raise TypeError("only the group that `rt.group` gave can be resized, not a part of it")
        if n < 0:
            raise ValueError(f"a group cannot have {n} members")
        async with self._resizing:
            old = self._roster
            grid = old.axes.resized(n) if axes is None else Axes.of(axes, n)
            if n == old.size and grid == old.axes:
                return
            self._last_epoch += 1
            wanted = Roster[Any](old.id, self._last_epoch, n, grid)
            new = await owner.grow(wanted) if n > old.size else []
            surplus = old.members[n:]
            # Before they are stopped, so that no new call goes to them.
            self._roster = replace(wanted, members=(*old.members[:n], *new))
            for member in surplus:
                self._under_way.pop(target_of(member), None)
            told = owner.tell(replace(wanted, members=tuple(self)), list(self._roster.members))
            if surplus:
                await owner.shrink(list(surplus))
            await told

    @overload
    def __getitem__(self, index: int) -> ActorT: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> ActorT | Self:
        if isinstance(index, slice):
            ranks = range(len(self))[index]
            name = f"{ranks.start}:{ranks.stop}:{ranks.step}"
            return type(self)(self._roster.part(tuple(ranks), name, Axes()), self._class)
        return self._member(self._roster.members[index])

    def __len__(self) -> int:
        return len(self._roster.members)

    def __iter__(self) -> Iterator[ActorT]:
        return map(self._member, self._roster.members)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._roster.members)} {self._class.__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._roster, self._class)

    def _member(self, handle: Any) -> ActorT:
        """A member as users see it."""
        member: ActorT = handle
        return member

    def _find(self, m: Any) -> MethodSpec:
        name = getattr(m, "__name__", None)
        spec = specs_of(self._class).get(name or "")
        if spec is None:
            raise TypeError(
                f"{m!r:.80} is not a remote method of {self._class.__name__}: decorate it with @aiodaft.method"
            )
        return spec

    def _spec(self, m: Any, *, streams: bool = False) -> MethodSpec:
        spec = self._find(m)
        if spec.is_stream and not streams:
            raise TypeError(f"{spec.label} is a stream: use `group.any`, or call it on one member")
        return spec

    def _targets(self) -> list[CallTarget]:
        return [target_of(member) for member in self._roster.members]

    def _freest(self, busy: Mapping[CallTarget, int] = _NO_CALLS) -> CallTarget:
        """The member to call next: the healthiest, then one with room among its `busy` calls, then the least busy."""
        targets = self._targets()
        if not targets:
            raise ValueError("the group has no members")
        self._turn += 1
        turned = targets[self._turn % len(targets) :] + targets[: self._turn % len(targets)]

        def rank(target: CallTarget) -> tuple[int, bool, int]:
            under_way = len(self._under_way.get(target, ()))
            return target.health().value, busy.get(target, 0) >= _UNDER_WAY, under_way

        return min(turned, key=rank)

    def _call(self, target: CallTarget, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        ref = target.call(spec, args, kwargs)
        under_way = self._under_way.setdefault(target, set())
        under_way.add(ref._state)
        ref._state.watch(under_way.discard)
        return ref


class _Map:
    """One `Group.map`: its calls under way and its untaken results."""

    def __init__(
        self,
        group: Group[Any],
        spec: MethodSpec,
        items: Iterator[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._group = group
        self._spec = spec
        self._items = items
        self._args = args
        self._kwargs = kwargs
        # Whether more items are taken; the error that `items` or a call to be made raised.
        self._open = True
        self._failure: Exception | None = None
        # Calls with untaken results: all in the order of items, the finished in the order in which they finished.
        self._calls: dict[Ref[Any], None] = {}
        self._over: dict[Ref[Any], None] = {}
        self._under_way: Counter[CallTarget] = Counter()
        self._stored_bytes = 0
        self._news = asyncio.Event()

    async def results(self, *, ordered: bool) -> AsyncGenerator[Any, None]:
        """Yield the results; see `Group.map`."""
        try:
            while True:
                self._begin_calls()
                if not self._calls:
                    break
                ref = next(iter(self._calls if ordered or not self._over else self._over))
                if ref in self._over:
                    yield await ref
                    self._taken(ref)
                else:
                    self._news.clear()
                    await self._news.wait()
            if self._failure is not None:
                raise self._failure
        finally:
            for ref in self._calls:
                ref._state.mark_seen()
                ref.cancel()

    def _begin_calls(self) -> None:
        """Make calls while members are free and the bounds allow it."""
        group = self._group
        most = _RESULTS * max(1, len(group))
        while self._open and len(self._over) < most and self._stored_bytes < _RESULT_BYTES:
            target = group._freest(self._under_way)
            if self._under_way[target] >= _UNDER_WAY:
                return
            try:
                item = next(self._items)
                ref = group._call(target, self._spec, (item, *self._args), self._kwargs)
            except StopIteration:
                self._open = False
                return
            except Exception as error:  # noqa: BLE001 - raised in the place of this item's result
                self._open, self._failure = False, error
                return
            self._calls[ref] = None
            self._under_way[target] += 1
            ref._state.watch(partial(self._ended, ref, target))

    def _ended(self, ref: Ref[Any], target: CallTarget, _: object) -> None:
        self._under_way[target] -= 1
        self._stored_bytes += ref._state.stored_bytes
        self._over[ref] = None
        if ref._state.error is not None:
            self._open = False
        self._news.set()

    def _taken(self, ref: Ref[Any]) -> None:
        del self._calls[ref], self._over[ref]
        self._stored_bytes -= ref._state.stored_bytes
