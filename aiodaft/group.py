"""Groups: actors of one class with ranks, called together."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, suppress
from math import ceil
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from aiodaft._protocol.groups.roster import Axes, Roster, even_shares
from aiodaft._protocol.numbers import is_count, is_number
from aiodaft._runtime.actors.host import RosterCell, Rosters
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.groups.member_calls import GroupMap, MemberCalls, Unit, is_asynchronous
from aiodaft._runtime.serialization.containers import builder
from aiodaft.actor import ActorFacts, CallTarget, handle_of, target_of
from aiodaft.exceptions import InsufficientResources
from aiodaft.html import facts, page, table
from aiodaft.methods import MethodSpec, Sig, StreamSig, specs_of
from aiodaft.policies import Load, Policy, fewest_in_flight
from aiodaft.ref import Ref, Refs, Stream

__all__ = ["Group"]

P = ParamSpec("P")
P1 = ParamSpec("P1")
R = TypeVar("R")
A0 = TypeVar("A0")
ActorT = TypeVar("ActorT")

# Items of `each`: values, or the results of an earlier call of a group; those of `map` may come one after the other.
Items: TypeAlias = Iterable[A0] | Refs[A0]
Source: TypeAlias = Items[A0] | AsyncIterable[A0]

# Loads new members with the state of others; see `Group.resize`.
Prepare: TypeAlias = Callable[[list[ActorT]], Awaitable[object]]


class MemberChanges(Protocol):
    """Makes and stops the members of a group, in the process that owns them: see `GroupMembers`."""

    cell: RosterCell

    def changing(self, group: Group[Any]) -> AbstractAsyncContextManager[None]: ...
    async def change(
        self,
        group: Group[Any],
        staying: Sequence[int],
        n: int,
        axes: Mapping[str, int] | None,
        prepare: Prepare[Any] | None,
    ) -> None: ...
    async def gone(self) -> list[int]: ...
    def renew(self) -> Awaitable[object]: ...


class _View(NamedTuple):
    """The way in which members are called.

    Attributes:
        along: The axes of which each place is called as one; none: each member is called by itself.
        places: The places, on other axes, of the members with the results.
        policy: The choice of `any` and `map`.
    """

    along: tuple[str, ...] = ()
    places: Mapping[str, int] = MappingProxyType({})
    policy: Policy = fewest_in_flight


@builder
class Group(Generic[ActorT]):
    """Actors of one class, numbered by rank.

    Methods are named by the class, `group.all(Model.step, batch)`, so that calls stay typed. An index gives a member,
    a slice a group of some of them, which does not own them.

    A copy in another process learns of changes soon after they were made, as long as that process reaches the owner;
    else it stays as it was, and its `repr` says so. A slice stays as it is.
    """

    def __init__(self, roster: Roster[Any], cls: type, owner: MemberChanges | None = None) -> None:
        # With the handles of the members; of a view: when it was made.
        self._cell = RosterCell(roster) if owner is None else owner.cell
        self._class = cls
        self._owner = owner
        self._calls = MemberCalls()
        self._of: Group[ActorT] | None = None
        self._view = _View()
        # A slice has its members for good.
        self._is_whole = True
        self._units: tuple[Roster[Any] | None, list[Unit]] = (None, [])

    @overload
    def all(self, m: Sig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Refs[R]: ...
    @overload
    def all(self, m: Sig[Concatenate[A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Refs[R]: ...
    def all(self, m: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every member with the same arguments; a ref argument goes to every member.

        If one of the calls fails, the others take part in no collective of `current_group` any more.
        """
        spec, (roster, units) = self._spec(m), self._seated()
        return self._call_all(roster, [(unit, args) for unit in units], spec, kwargs)

    def each(self, m: Sig[Concatenate[A0, P1], R], a0: Items[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Refs[R]:
        """Call a method of every member, with one item each as its first argument.

        Raises:
            ValueError: The number of items differs from that of members; no call was made.
        """
        spec, (roster, units) = self._spec(m), self._seated()
        items = list(_plain_items(a0, spec))
        if len(items) != len(units):
            raise ValueError(f"{spec.label}: {len(items)} items for {len(units)} members")
        calls = [(unit, (item, *args)) for unit, item in zip(units, items, strict=True)]
        return self._call_all(roster, calls, spec, kwargs)

    def split(self, m: Sig[Concatenate[A0, P1], R], a0: A0, /, *args: P1.args, **kwargs: P1.kwargs) -> Refs[R]:
        """Call a method of every member, with a contiguous part each of a batch as its first argument.

        Args:
            m: The method.
            a0: An object with a length and slices: a list, or a tensor or array, which is split along its first
                dimension. The sizes of the parts differ by at most one, the first ones are larger, and some may be
                empty.
            args: The other arguments, the same for each call.
            kwargs: The other arguments, by keyword.

        Raises:
            TypeError: The batch has no length or slices; no call was made.
            ValueError: The group has no members.
        """
        spec, (roster, units), batch = self._spec(m), self._seated(), cast("Any", a0)
        _check_some(units)
        try:
            parts = [batch[share] for share in even_shares(len(batch), len(units))]
        except (TypeError, KeyError) as error:
            raise TypeError(
                f"{spec.label}: {type(batch).__name__} cannot be split into slices; use `each` with one item per member"
            ) from error
        calls = [(unit, (part, *args)) for unit, part in zip(units, parts, strict=True)]
        return self._call_all(roster, calls, spec, kwargs)

    @overload
    def any(self, m: Sig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def any(self, m: Sig[Concatenate[A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs) -> Ref[R]: ...
    @overload
    def any(self, m: StreamSig[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...
    @overload
    def any(
        self, m: StreamSig[Concatenate[A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> Stream[R]: ...
    def any(self, m: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the member with the fewest calls of this group under way, in turn among equals.

        `with_policy` chooses in other ways. Members that are dead, restarting, silent or on a node that is being
        drained are left out, as far as this process knows (the controller knows all
        of them; another process learns of a death from its own connection or call). If no other member is left, the
        call waits for one that restarts or is silent; if all are dead, the ref fails at once with the `ActorDied` of
        one of them.

        Raises:
            ValueError: The group has no members.
        """
        spec = self._spec(m, streams=True)
        unit = self._choose()
        if spec.is_stream:
            return self._calls.stream(unit, spec, args, kwargs)
        return self._calls.call(unit, spec, args, kwargs)

    @overload
    def map(
        self, m: Sig[Concatenate[A0, P1], R], items: Source[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> AsyncGenerator[R, None]: ...
    # A keyword besides a ParamSpec cannot be typed: here only the items are checked.
    @overload
    def map(
        self,
        m: Sig[Concatenate[A0, ...], R],
        items: Source[A0],
        /,
        *args: Any,
        ordered: bool = True,
        return_exceptions: Literal[True],
        **kwargs: Any,
    ) -> AsyncGenerator[R | Exception, None]: ...
    @overload
    def map(
        self, m: Sig[Concatenate[A0, ...], R], items: Source[A0], /, *args: Any, ordered: bool, **kwargs: Any
    ) -> AsyncGenerator[R, None]: ...
    def map(  # type: ignore[misc]  # a ParamSpec may have these keywords
        self, m: Any, items: Any, /, *args: Any, ordered: bool = True, return_exceptions: bool = False, **kwargs: Any
    ) -> Any:
        """Call a method with each item, on members as they become free; `async for` gives the results.

        A member has as many calls of this map under way as the `concurrency` of the method, and one more, whose
        arguments travel meanwhile; two if the method has no `concurrency`. Members are left out as by `any`. At most 64
        untaken results per member, and 256 MiB of results over 64 KiB, wait for the loop; until it takes some, no call
        is made.

        Args:
            m: The method.
            items: The first argument of each call, also asynchronous, such as a `Stream`; taken as members become free.
            args: The other arguments, the same for each call.
            ordered: Whether results come in the order of the items; False gives each as soon as it exists.
            return_exceptions: Whether the error of a call is given in the place of its result, and the others go on.
            kwargs: The other arguments, by keyword.

        Raises:
            Exception: The error of a call (unless it is given) or of `items`, in the place of the result. After an
                error no items are taken; the results before it are given, and the calls after it are cancelled.
            ValueError: The group has no members.

        Cancellation: the calls under way are cancelled, as they are when the loop is left. If you leave the loop early
        while a name still refers to the iterator, use `contextlib.aclosing`.
        """
        spec = self._spec(m)

        def call(unit: Unit, item: Any) -> Ref[Any]:
            return self._calls.call(unit, spec, (item, *args), kwargs)

        window = (spec.rules.concurrency or 1) + 1
        group_map = GroupMap(items, self._choose, call, self.__len__, window, keeps_on=return_exceptions)
        return group_map.results(spec.label, ordered=ordered)

    def along(self, *axes: str, result: Mapping[str, int] | None = None) -> Self:
        """A view in which the members at one place on these axes are called as one.

        With `axes={"dp": 2, "tp": 4}`, `group.along("dp").each(Trainer.step, shards)` gives shard i to the four members
        at dp=i, and gives one result per place on dp. All calls of a group work so: `split` a batch over dp, `any` one
        replica, `map` with replicas. The view follows the changes of the group.

        An error of a member whose result does not count is raised by `await refs`; with `any` and `map` it goes to the
        scope that owns the member, unless the call whose result counts fails as well.

        Args:
            axes: Their names.
            result: The place on other axes of the member whose result counts, such as `{"pp": -1}` for that of the last
                stage. Default: place 0 on each.

        Raises:
            ValueError: The group has no such axis or place.
            TypeError: This is such a view.
        """
        if self._view.along:
            raise TypeError(f"this is a view along {', '.join(self._view.along)}: name all axes in one call of `along`")
        roster, places = self._roster, dict(result or {})
        roster.axes.leads(axes, places)
        return self._seen_by(self._view._replace(along=axes, places=places))

    def with_policy(self, policy: Policy) -> Self:
        """A view in which `any` and `map` choose among the members that can take a call by this policy.

        The view shares the count of calls with the group, and follows its changes.

        Args:
            policy: A function of `aiodaft.policies`, or of yours: it gets the `Load` of each such member, and returns
                the index of one.
        """
        return self._seen_by(self._view._replace(policy=policy))

    def _seen_by(self, view: _View) -> Self:
        made = type(self)(self._roster, self._class)
        made._of, made._calls, made._view = self._of or self, self._calls, view
        return made

    @property
    def _roster(self) -> Roster[Any]:
        return (self if self._of is None else self._of)._cell.roster

    @property
    def id(self) -> str:
        """The name of the group, unique in the cluster; its members know it, too."""
        return self._roster.id

    @property
    def epoch(self) -> int:
        """Counts the changes and the restarts of the members, from 1."""
        return self._roster.epoch

    @property
    def axes(self) -> Mapping[str, int]:
        """The names and sizes of the axes; empty if the group has none. The last axis changes fastest with the rank."""
        axes, along = self._roster.axes, self._view.along
        return (axes.pick(along) if along else axes).sizes

    async def resize(
        self, n: int, *, axes: Mapping[str, int] | None = None, prepare: Prepare[ActorT] | None = None
    ) -> None:
        """Resize the group to n members: make new ones like the first, or stop the last ranks.

        Unless nothing changes, the group gets a new epoch. The other members know of it when this returns: see
        `current_group`. A member that is restarted meanwhile knows it when it is up. Work of the others goes on.

        A member that leaves gets no new calls. The calls that this process has made of it through the group, and those
        that need a value stored by its process, have `stop_grace` to end; then it is stopped, as by `rt.stop`.

        Args:
            n: The number of members.
            axes: The new sizes of the axes. Default: the first one changes, and members keep their places.
            prepare: An `async def` function of the list of new members, which are not in the group yet. It lets them
                take over the state of others, by refs, before they get any other call. They know their rank.

        Raises:
            TypeError: The group is a slice or a view of another, or came from another process.
            ValueError: The axes do not fit the number.
            InsufficientResources: There are not enough resources; the group stays as it is.
            RuntimeError: The `prepare` of a change changes the same group.
            Exception: The error of `prepare`: the new members are stopped, and the group stays as it is.

        Cancellation: members that are being made or prepared are taken back, and the group stays as it is; once they
        are in the group, it is as it is to be. Members to be stopped are killed.
        """
        if n < 0:
            raise ValueError(f"a group cannot have {n} members")
        owner = self._owner_here()
        async with owner.changing(self):
            await owner.change(self, range(self._roster.size), n, axes, prepare)

    async def scale(
        self,
        least: int,
        most: int,
        size: Callable[[Sequence[Load]], float],
        *,
        every: float = 1.0,
        prepare: Prepare[ActorT] | None = None,
    ) -> NoReturn:
        """Resize the group to what a function of the loads of its members says, again and again: run it in a task.

        Args:
            least: The fewest members.
            most: The most members.
            size: Gets the load of each member, by rank, and returns the number of members that there are to be.
            every: Seconds between two looks.
            prepare: As for `resize`.

        Raises:
            ValueError: The sizes or the seconds are not valid, or `size` gives no finite number.
            Exception: That of `size`. As `resize`; but while there are no resources for more, it looks again.

        Cancellation: it ends; for a change under way see `resize`.
        """
        if not (is_count(least) and is_count(most, least) and is_number(every)):
            raise ValueError(
                f"scale({least!r}, {most!r}, every={every!r}): two sizes, 1 or more, and seconds are needed"
            )
        while True:
            found = size(self._calls.loads(self._seats()))
            try:
                wanted = max(least, min(most, ceil(found)))
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"scale: {size!r:.80} gave {found!r:.80}, which is no number of members") from error
            with suppress(InsufficientResources):
                await self.resize(wanted, prepare=prepare)
            await asyncio.sleep(every)

    async def heal(
        self, n: int | None = None, *, axes: Mapping[str, int] | None = None, prepare: Prepare[ActorT] | None = None
    ) -> list[int]:
        """Leave out the members that are gone for good, and make new ones up to n.

        If n is at least the former number, the others keep their ranks, and so their places on the axes; the new
        members get the ranks that are free. Else the others close ranks, in order. For the rest see `resize`.

        A member is gone if its process has ended or it was stopped, and it is not restarted. Each is asked; one that is
        silent is waited for until its `Patience` is over.

        Args:
            n: The number of members. Default: those that are left.
            axes: As for `resize`.
            prepare: As for `resize`.

        Returns:
            The former ranks of the members that were left out.

        Raises:
            Exception: As `resize`.

        Cancellation: as for `resize`.
        """
        if n is not None and n < 0:
            raise ValueError(f"a group cannot have {n} members")
        owner = self._owner_here()
        async with owner.changing(self):
            gone = await owner.gone()
            staying = [rank for rank in range(self._roster.size) if rank not in gone]
            await owner.change(self, staying, len(staying) if n is None else n, axes, prepare)
        return gone

    async def remove(self, *members: ActorT, axes: Mapping[str, int] | None = None) -> None:
        """Stop some of the members; the others close ranks, in order. For the rest see `resize`.

        Args:
            members: Members: `group[1]`, or `*group[2:]` for several.
            axes: As for `resize`.

        Raises:
            ValueError: One is not in the group.
            Exception: As `resize`.

        Cancellation: as for `resize`.
        """
        owner = self._owner_here()
        async with owner.changing(self):
            ranks = [self._rank_of(member) for member in members]
            staying = [rank for rank in range(self._roster.size) if rank not in ranks]
            await owner.change(self, staying, len(staying), axes, None)

    async def renew(self) -> None:
        """Give the group a new epoch with the same members: their open collectives end with `GroupChanged`.

        For members that run for a long time by themselves, and are not at the same call of a key any more. The restart
        of a member does this by itself. The members know of it when this returns.

        Raises:
            TypeError: As `resize`.

        Cancellation: the group has the new epoch.
        """
        await self._owner_here().renew()

    def _rank_of(self, member: ActorT) -> int:
        handle = handle_of(member)
        if handle not in self._roster.members:
            raise ValueError(f"{handle!r:.200} is no member of {self!r}")
        return self._roster.members.index(handle)

    def _owner_here(self) -> MemberChanges:
        if self._owner is None:
            raise TypeError("only the group that `rt.group` gave can be changed, not a part, view or copy of it")
        return self._owner

    @overload
    def __getitem__(self, index: int) -> ActorT: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> ActorT | Self:
        if not isinstance(index, slice):
            return self._member(self._handles()[index])
        if self._view.along:
            raise TypeError(f"a view along {', '.join(self._view.along)} has no slices")
        ranks = range(len(self))[index]
        part = self._roster.part(tuple(ranks), f"{ranks.start}:{ranks.stop}:{ranks.step}", Axes())
        made = type(self)(part, self._class)
        made._is_whole = False
        return made

    def __len__(self) -> int:
        return len(self._seats())

    def __iter__(self) -> Iterator[ActorT]:
        return map(self._member, self._handles())

    def __repr__(self) -> str:
        along = f" along {', '.join(self._view.along)}" if self._view.along else ""
        frozen = "" if self._cell.follows else f", as it was at epoch {self.epoch}"
        return f"<{type(self).__name__} of {len(self._roster.members)} {self._class.__name__}{along}{frozen}>"

    def _repr_html_(self) -> str:
        roster = self._roster
        rows = [
            (rank, *roster.axes.coords(rank).values(), *target_of(member).facts())
            for rank, member in enumerate(roster.members)
        ]
        about = facts({"id": self.id, "epoch": self.epoch})
        return page(repr(self).strip("<>"), about, table(["rank", *roster.axes.sizes, *ActorFacts._fields], rows))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._of is None:
            return _copy_of, (type(self), self._cell.roster, self._class, self._is_whole)
        along, places, policy = self._view
        return _view_of, (self._of, along, dict(places), None if policy is fewest_in_flight else policy)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # Python asks for private names even before __init__ has run.
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and self._has_method(name):
                what += f": use `group.all({self._class.__name__}.{name}, ...)`, or call it on one member"
            raise AttributeError(what)

    def _handles(self) -> list[Any]:
        members = self._roster.members
        return [members[unit.rank] for unit in self._seats()]

    def _member(self, handle: Any) -> ActorT:
        member: ActorT = handle
        return member

    def _find(self, m: Any) -> MethodSpec:
        name = getattr(m, "__name__", None)
        spec = specs_of(self._class).get(name or "")
        if spec is not None:
            return spec
        cls, known = self._class.__name__, isinstance(m, str) and self._has_method(m)
        advice = f"pass {cls}.{m}, not its name" if known else "decorate it with @aiodaft.method"
        raise TypeError(f"{m!r:.80} is not a remote method of {cls}: {advice}")

    def _has_method(self, name: str) -> bool:
        return name in specs_of(self._class)

    def _spec(self, m: Any, *, streams: bool = False) -> MethodSpec:
        spec = self._find(m)
        if spec.is_stream and not streams:
            raise TypeError(f"{spec.label} is a stream: use `group.any`, or call it on one member")
        return spec

    def _seats(self) -> list[Unit]:
        """The receivers of one item of `each`: the members, or those of a view that are called as one."""
        return self._seated()[1]

    def _seated(self) -> tuple[Roster[Any], list[Unit]]:
        roster = self._roster
        known, units = self._units
        if known is not roster:
            targets = [target_of(member) for member in roster.members]
            if self._view.along:
                leads = roster.axes.leads(self._view.along, self._view.places)
            else:
                leads = [(rank, ()) for rank in range(len(targets))]
            units = [Unit(rank, targets[rank], tuple(targets[other] for other in others)) for rank, others in leads]
            self._units = roster, units
        return roster, units

    def _choose(self, full: Collection[CallTarget] = ()) -> Unit:
        units = self._seats()
        _check_some(units)
        return self._calls.choose(units, self._view.policy, full)

    def _call_all(
        self,
        roster: Roster[Any],
        calls: Sequence[tuple[Unit, tuple[Any, ...]]],
        spec: MethodSpec,
        kwargs: dict[str, Any],
    ) -> Refs[Any]:
        whole = self if self._of is None else self._of
        # The members of a slice may meet the rest of the group in collectives.
        return self._calls.call_all(calls, spec, kwargs, roster if whole._is_whole else None)


@builder
def _copy_of(kind: type[Group[ActorT]], roster: Roster[Any], cls: type, is_whole: bool) -> Group[ActorT]:
    made = kind(roster, cls)
    made._is_whole = is_whole
    if is_whole and roster.members:
        made._cell = cast("Target", target_of(roster.members[0])).process.part(Rosters).copy(roster)
    return made


@builder
def _view_of(
    group: Group[ActorT], along: tuple[str, ...], places: dict[str, int], policy: Policy | None
) -> Group[ActorT]:
    view = group.along(*along, result=places) if along else group
    return view.with_policy(policy or fewest_in_flight)


def _check_some(units: Sequence[Unit]) -> None:
    if not units:
        raise ValueError("the group has no members")


def _plain_items(items: Any, spec: MethodSpec) -> Iterable[Any]:
    if is_asynchronous(items):
        raise TypeError(f"{spec.label}: the items are asynchronous: pass `[item async for item in items]`")
    return cast("Iterable[Any]", items)
