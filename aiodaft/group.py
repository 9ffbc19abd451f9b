"""Groups: like actors with ranks, called together."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from aiodaft.actor import CallTarget, target_of
from aiodaft.methods import MethodSpec, Sig, StreamSig, specs_of
from aiodaft.ref import Ref, Refs, Stream

__all__ = ["Group"]

P = ParamSpec("P")
P1 = ParamSpec("P1")
R = TypeVar("R")
A0 = TypeVar("A0")
ActorT = TypeVar("ActorT")

# Calls per member that `map` keeps under way: the next argument travels while the member works.
_AHEAD = 2


class Group(Generic[ActorT]):
    """Actors of one class, numbered by rank.

    Methods are named by the class, `group.all(Model.step, batch)`, so that calls stay typed. An index gives a member,
    a slice a group of some of them, which does not own them.
    """

    def __init__(
        self,
        members: Iterable[ActorT],
        cls: type,
        grow: Callable[[int, int], Awaitable[list[ActorT]]] | None = None,
        shrink: Callable[[list[ActorT]], Awaitable[None]] | None = None,
    ) -> None:
        self._members = list(members)
        self._class = cls
        self._grow = grow
        self._shrink = shrink
        self._in_flight: dict[CallTarget, int] = {}
        self._turn = 0

    @overload
    def all(self, m: Sig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Refs[R]: ...
    @overload
    def all(self, m: Sig[Concatenate[A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Refs[R]: ...
    def all(self, m: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every member with the same arguments. A ref among them goes to every member."""
        spec = self._spec(m)
        return Refs([self._call(target, spec, args, kwargs) for target in self._targets()])

    @overload
    def each(
        self, m: Sig[Concatenate[A0, P1], R], a0: Iterable[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> Refs[R]: ...
    @overload
    def each(self, m: Sig[Concatenate[A0, P1], R], a0: Refs[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Refs[R]: ...
    def each(self, m: Any, a0: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every member, the i-th with the i-th item as its first argument.

        Raises:
            ValueError: There are more or fewer items than members; nothing was called.
        """
        spec = self._spec(m)
        items = list(a0)
        if len(items) != len(self._members):
            raise ValueError(f"{spec.label}: {len(items)} items for {len(self._members)} members")
        pairs = zip(self._targets(), items, strict=True)
        return Refs([self._call(target, spec, (item, *args), kwargs) for target, item in pairs])

    @overload
    def any(self, m: Sig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def any(self, m: Sig[Concatenate[A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Ref[R]: ...
    @overload
    def any(self, m: StreamSig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...
    def any(self, m: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one member: the one with the fewest calls of this group under way, in turn among equals."""
        spec = self._spec(m, streams=True)
        target = self._freest()
        if spec.is_stream:
            stream = target.stream(spec, args, kwargs)
            self._count(target)
            stream.when_over(lambda _: self._uncount(target))
            return stream
        return self._call(target, spec, args, kwargs)

    @overload
    def map(
        self, m: Sig[Concatenate[A0, P1], R], items: Iterable[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> AsyncIterator[R]: ...
    @overload
    def map(
        self, m: Sig[Concatenate[A0, P1], R], items: Refs[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> AsyncIterator[R]: ...
    def map(self, m: Any, items: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method with each item, on members as they become free; `async for` gives the results in item order.

        Items are taken as they are needed: at most two calls per member are under way. Leaving the loop cancels
        those.
        """
        return self._map(self._spec(m), iter(items), args, kwargs)

    async def resize(self, n: int) -> None:
        """Make the group n members large: new ones are made like the first, surplus ones are stopped, last rank first.

        Raises:
            TypeError: The group is a slice of another, or came from another process.
            InsufficientResources: There is no room; the group stays as it is.
        """
        if self._grow is None or self._shrink is None:
            raise TypeError("only the group that `rt.group` gave can be resized, not a part of it")
        if n < 0:
            raise ValueError(f"a group cannot have {n} members")
        if n > len(self._members):
            self._members += await self._grow(len(self._members), n - len(self._members))
        elif n < len(self._members):
            # Taken out first: nothing is called on them from here on.
            surplus = self._members[n:]
            del self._members[n:]
            await self._shrink(surplus)

    @overload
    def __getitem__(self, index: int) -> ActorT: ...
    @overload
    def __getitem__(self, index: slice) -> Group[ActorT]: ...
    def __getitem__(self, index: int | slice) -> ActorT | Group[ActorT]:
        if isinstance(index, slice):
            return Group(self._members[index], self._class)
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[ActorT]:
        return iter(self._members)

    def __repr__(self) -> str:
        return f"<Group of {len(self._members)} {self._class.__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Group, (self._members, self._class)

    def _spec(self, m: Any, *, streams: bool = False) -> MethodSpec:
        name = getattr(m, "__name__", None)
        spec = specs_of(self._class).get(name or "")
        if spec is None:
            raise TypeError(
                f"{m!r:.80} is not a remote method of {self._class.__name__}: decorate it with @aiodaft.method"
            )
        if spec.is_stream and not streams:
            raise TypeError(f"{spec.label} is a stream: use `group.any`, or call it on one member")
        return spec

    def _targets(self) -> list[CallTarget]:
        return [target_of(member) for member in self._members]

    def _freest(self) -> CallTarget:
        targets = self._targets()
        if not targets:
            raise ValueError("the group has no members")
        self._turn += 1
        turned = targets[self._turn % len(targets) :] + targets[: self._turn % len(targets)]
        return min(turned, key=lambda target: self._in_flight.get(target, 0))

    def _call(self, target: CallTarget, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        ref = target.call(spec, args, kwargs)
        self._count(target)
        ref._state.watch(lambda _: self._uncount(target))
        return ref

    def _count(self, target: CallTarget) -> None:
        self._in_flight[target] = self._in_flight.get(target, 0) + 1

    def _uncount(self, target: CallTarget) -> None:
        self._in_flight[target] -= 1
        if not self._in_flight[target]:
            del self._in_flight[target]

    async def _map(
        self, spec: MethodSpec, items: Iterator[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        under_way: deque[Ref[Any]] = deque()
        try:
            while True:
                while len(under_way) < _AHEAD * max(1, len(self._members)):
                    try:
                        item = next(items)
                    except StopIteration:
                        break
                    under_way.append(self._call(self._freest(), spec, (item, *args), kwargs))
                if not under_way:
                    return
                yield await under_way[0]
                under_way.popleft()
        finally:
            for ref in under_way:
                ref._state.mark_seen()
                ref.cancel()
