"""Collectives on refs: the values of several actors are combined or exchanged, from actor to actor.

A collective takes refs, one for each member; the process that has or makes the i-th value is member i. It returns at
once, also if the values do not exist yet, with refs of the results, each at its member. No payload passes the caller.
Collectives that are issued in any order, and that share members, cannot wait for each other.

All of them raise the following. For awaiting a result:
    Exception: The error of a value; `ActorDied` names a member that died before the result was there.
    ValueError: The kinds of the values (type, dtype, shape) differ; it names two ranks. All results raise it.
    TypeError: A value cannot be reduced or cut.
Cancellation of a result: as for any ref. The results of the other members are not concerned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, Literal, NamedTuple, Never, ParamSpec, TypeAlias, TypeVar, cast, overload

from aiodaft._protocol.groups import collective
from aiodaft._protocol.groups.collective import ALL_REDUCE, Cut
from aiodaft._protocol.numbers import is_count
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.groups.collectives import (
    DEATHS,
    Members,
    OfAll,
    Place,
    check_reducer,
    place_beside,
    place_of,
    place_of_living,
)
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft.actor import target_of
from aiodaft.ref import Ref, Refs

__all__ = [
    "First",
    "OfAll",
    "Survivors",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "among_survivors",
    "broadcast",
    "first_of",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

Op: TypeAlias = Literal["sum", "product", "min", "max"] | Callable[[T, T], T] | OfAll[T, T]
Algorithm: TypeAlias = Literal["exchange", "star", "shared", "direct", "ring", "tree", "doubling"]


@overload
def all_reduce(refs: Iterable[Ref[T]], op: OfAll[T, R], *, algorithm: Algorithm | None = None) -> Refs[R]: ...
@overload
def all_reduce(refs: Iterable[Ref[T]], op: Op[T] = "sum", *, algorithm: Algorithm | None = None) -> Refs[T]: ...
def all_reduce(refs: Iterable[Ref[Any]], op: Any = "sum", *, algorithm: Algorithm | None = None) -> Refs[Any]:
    """Combine the values of all members; each member gets the result.

    The values are tensors or arrays of one dtype and shape, or numbers; a function combines any values. All members get
    the same bits, and the same inputs give the same bits each time. Without `algorithm`, the values are combined from
    the left in the order of ranks: ((x0 + x1) + x2) + x3.

    Args:
        refs: The values, one for each member.
        op: "sum", "product", "min", "max", or a function of two values, which must not change them. It runs in the
            members' processes, has to be associative, and gets whole values. Or an `OfAll`, for exchange and star.
        algorithm: The way to combine. Default: exchange, star, shared or direct, by the number of members, by the size
            of the values if they exist already, and by whether the members are on one machine.

            - exchange: each member reads all values whole. Fewest steps: for two members, or small values.
            - star: member 0 reduces all, the others take the result. Least work: for members on one machine.
            - shared: each reduces its part of all values, which it reads where they lie: for members on one machine,
              with large values.
            - direct: each sends to each other one the part that this one reduces: for members on several machines.
            - tree: neighbours reduce in pairs, then pairs of pairs: (x0 + x1) + (x2 + x3).
            - ring: part k is combined in the order k + 1, k + 2, ..., k of ranks.
            - doubling: recursive doubling; ranks over a power of two are added to the first ranks before.

            For ring and doubling a function has to be commutative. It cannot be combined by parts: use another
            algorithm than shared, direct and ring for it.

    Raises:
        ValueError: There are no refs, or no such op or algorithm, or the algorithm cuts values for a function.
    """
    members, reducer = _members(refs), check_reducer(op)
    count, by_function = len(members.places), callable(reducer)
    if algorithm is None:
        algorithm = cast(
            "Algorithm",
            collective.choose(count, members.nbytes, one_memory=members.one_memory, elementwise=not by_function),
        )
    elif algorithm not in ALL_REDUCE:
        raise ValueError(f"algorithm is one of {', '.join(ALL_REDUCE)}, not {algorithm!r}")
    elif isinstance(reducer, OfAll) and algorithm not in {"exchange", "star"}:
        raise ValueError(f"{algorithm} never has all values whole, which {reducer} needs: use star or exchange")
    elif by_function and algorithm in {"shared", "direct", "ring"}:
        raise ValueError(f"{algorithm} combines parts of values, and a function is for whole ones: use star or tree")
    return Refs(members.carry_out(ALL_REDUCE[algorithm](count), reducer, "all_reduce"))


@overload
def reduce(refs: Iterable[Ref[T]], op: OfAll[T, R], *, root: int = 0) -> Ref[R]: ...
@overload
def reduce(refs: Iterable[Ref[T]], op: Op[T] = "sum", *, root: int = 0) -> Ref[T]: ...
def reduce(refs: Iterable[Ref[Any]], op: Any = "sum", *, root: int = 0) -> Ref[Any]:
    """Combine the values of all members in the order of ranks; one member gets the result.

    Args:
        refs: The values, as for `all_reduce`.
        op: As for `all_reduce`.
        root: The rank of the member that gets the result.

    Raises:
        ValueError: There are no refs, no such op or no such rank.
    """
    members, reducer = _members(refs), check_reducer(op)
    count, nbytes = len(members.places), members.nbytes
    by_parts = not callable(reducer) and members.one_memory and (nbytes is None or nbytes > collective.SMALL)
    plan = collective.reduce(count, _rank(root, count), by_parts=by_parts)
    return members.carry_out(plan, reducer, "reduce")[0]


def reduce_scatter(refs: Iterable[Ref[T]], op: Op[T] = "sum") -> Refs[T]:
    """Combine the values of all members in the order of ranks; each member gets its part of the result.

    The values are tensors or arrays. They are cut along the first dimension as by `torch.tensor_split`: if its length
    cannot be divided by the number of members, the parts of the first members are longer by one.

    Args:
        refs: The values, as for `all_reduce`.
        op: As for `all_reduce`; a function gets parts.

    Raises:
        ValueError: There are no refs, or no such op.
    """
    members, reducer = _members(refs), check_reducer(op)
    plan = collective.reduce_scatter(len(members.places), one_memory=members.one_memory)
    return Refs(members.carry_out(plan, reducer, "reduce_scatter"))


def all_gather(refs: Iterable[Ref[T]]) -> Refs[list[T]]:
    """Give each member the list of the values of all members. The values may be of different kinds.

    Raises:
        ValueError: There are no refs.
    """
    members = _members(refs)
    return Refs(members.carry_out(collective.all_gather(len(members.places)), "sum", "all_gather"))


def gather(refs: Iterable[Ref[T]], *others: Never, root: int = 0) -> Ref[list[T]]:
    """Give one member the list of the values of all members. The values may be of different kinds.

    Raises:
        TypeError: Refs were given one by one.
        ValueError: There are no refs, or no member has the rank `root`.
    """
    members = _members(refs, *others)
    count = len(members.places)
    return members.carry_out(collective.gather(count, _rank(root, count)), "sum", "gather")[0]


def all_to_all(refs: Iterable[Ref[list[T]]]) -> Refs[list[T]]:
    """Exchange items: every member has a list with one item for each member, and gets a list of one item of each.

    Result j is the list of item j of all members, in the order of ranks. Items may be of different kinds and sizes.

    Raises:
        ValueError: There are no refs.
    """
    members = _members(refs)
    plan = collective.all_to_all(len(members.places), one_memory=members.one_memory)
    return Refs(members.carry_out(plan, "sum", "all_to_all"))


def broadcast(ref: Ref[T], to: Iterable[Any]) -> Refs[T]:
    """Give a value to actors: result i is at the process of actor i.

    Args:
        ref: The value, of any kind.
        to: Handles of actors, such as a `Group`.

    Raises:
        TypeError: `to` has something else than handles.
        ValueError: There are no actors.
    """
    return _hand_out(ref, to, Cut.WHOLE, "broadcast")


def scatter(ref: Ref[list[T]], to: Iterable[Any]) -> Refs[T]:
    """Give each of several actors one item of a list: result i is at the process of actor i.

    Args:
        ref: The list; it has as many items as there are actors.
        to: Handles of actors, such as a `Group`.

    Raises:
        TypeError: `to` has something else than handles.
        ValueError: There are no actors.
    """
    return _hand_out(ref, to, Cut.ITEM, "scatter")


def _hand_out(ref: Ref[Any], to: Iterable[Any], cut: Cut, title: str) -> Refs[Any]:
    (source,) = _members([ref]).places
    receivers = [_place_beside(handle) for handle in to]
    if not receivers:
        raise ValueError("there are no actors to give a value to")
    members = Members([ref], [source, *receivers])
    return Refs(
        members.carry_out(collective.hand_out(len(receivers), cut, one_memory=members.one_memory), "sum", title)
    )


class First(NamedTuple, Generic[T]):
    """The values that have come first.

    Attributes:
        ranks: Their places among the refs that were given, in this order.
        refs: Their refs, in the same order.
        late: By their places, the refs of the values that had not come, if they are kept.
    """

    ranks: tuple[int, ...]
    refs: Refs[T]
    late: dict[int, Ref[T]]


async def first_of(refs: Iterable[Ref[T]], k: int, *, late: Literal["cancel", "keep"] = "cancel") -> First[T]:
    """Wait for the first k values, for a collective among their members: `all_reduce((await first_of(refs, 3)).refs)`.

    A value that a death has taken is left out. No value comes here.

    Args:
        refs: The values, one for each member.
        k: Their number.
        late: "cancel": the calls of the other values are cancelled. "keep": they go on, and you have their refs for the
            next round.

    Raises:
        ValueError: There are fewer refs than k, k is not positive, or `late` is another word.
        ActorDied, PeerLost: So many have died that k values cannot come.
        Exception: The error of a value that has come.

    Cancellation: the values go on.
    """
    waited = dict(enumerate(_listed(refs)))
    if not (is_count(k) and k <= len(waited)):
        raise ValueError(f"k is the number of values to wait for, 1 to {len(waited)}, not {k!r:.80}")
    if late not in {"cancel", "keep"}:
        raise ValueError(f'late is "cancel" or "keep", not {late!r}')
    came: asyncio.Queue[int] = asyncio.Queue()
    watches = [(state_of(ref), lambda _, rank=rank: came.put_nowait(rank)) for rank, ref in waited.items()]
    for state, watch in watches:
        state.watch(watch, interested=True)
    first: dict[int, Ref[T]] = {}
    try:
        while len(first) < k:
            rank = await came.get()
            ref = waited.pop(rank)
            error = ref.exception()
            if error is None:
                first[rank] = ref
            elif not isinstance(error, DEATHS) or len(first) + len(waited) < k:
                raise error
    finally:
        for state, watch in watches:
            state.unwatch(watch)
    if late == "cancel":
        for ref in waited.values():
            state_of(ref).mark_seen()
            ref.cancel()
        waited = {}
    return First(tuple(sorted(first)), Refs([first[rank] for rank in sorted(first)]), waited)


class Survivors(NamedTuple, Generic[R]):
    """The result of a collective among survivors.

    Attributes:
        ranks: The places of the values that are in the results, among the refs that were given.
        refs: The results of their members, in this order.
    """

    ranks: tuple[int, ...]
    refs: Refs[R]


async def among_survivors(
    collective: Callable[Concatenate[Iterable[Ref[T]], P], Refs[R]],
    refs: Iterable[Ref[T]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Survivors[R]:
    """Carry out a collective among the members that live: `await among_survivors(all_reduce, gradients, "sum")`.

    Values of members that have died, or die in the middle, are left out, and the others begin again: all results are
    made of the values of the same members. It returns when they exist.

    Args:
        collective: `all_reduce`, `reduce_scatter`, `all_gather`, or a function of yours that takes and gives refs so.
        refs: The values, one for each member.
        args: Other arguments of the collective.
        kwargs: The same, by keyword.

    Raises:
        ActorDied, PeerLost: No value is left, or the death is not that of a member.
        Exception: The error of a value or a result that is no death.

    Cancellation: as for the results of the collective.
    """
    values = dict(enumerate(refs))
    while True:
        places = [place_of(ref) for ref in values.values()]
        results = collective(list(values.values()), *args, **kwargs)
        error = await _error_of(results)
        if error is None:
            return Survivors(tuple(values), results)
        if not isinstance(error, DEATHS):
            raise error
        found = await asyncio.gather(*map(place_of_living, values.values()))
        if found == places:
            raise error
        values = {rank: ref for (rank, ref), place in zip(values.items(), found, strict=True) if place is not None}
        if not values:
            raise error


def _members(refs: Iterable[Ref[Any]], *others: Never) -> Members:
    if others or isinstance(refs, Ref):
        raise TypeError(
            "a collective takes the refs of all members together, such as `group.all(...)` gives them; "
            "`await asyncio.gather(*refs)` gives the values of refs"
        )
    return Members(_listed(refs))


def _listed(refs: Iterable[Ref[T]]) -> list[Ref[T]]:
    listed = list(refs)
    for ref in listed:
        if not isinstance(ref, Ref):
            raise TypeError(f"a collective takes refs, one for each member, not {type(ref).__name__}")
    if not listed:
        raise ValueError("a collective needs at least one ref")
    return listed


def _rank(root: int, count: int) -> int:
    if not 0 <= root < count:
        raise ValueError(f"root is the rank of one of {count} members, from 0, not {root}")
    return root


def _place_beside(handle: Any) -> Place:
    return place_beside(cast("Target", target_of(handle)))


async def _error_of(results: Refs[Any]) -> BaseException | None:
    """The error of results, once all exist or have failed: rather one that is no death."""
    await asyncio.gather(*(result.ready() for result in results))
    errors = [error for result in results if (error := result.exception()) is not None]
    return min(errors, key=lambda error: isinstance(error, DEATHS), default=None)


Key: TypeAlias = str | int | tuple[Any, ...] | None


class How(NamedTuple):
    """The options of a collective; see `MemberCollectives`."""

    key: Key = None
    timeout: float | None = None
    out: Any = None
    op: Any = "sum"
    root: int = 0
    lengths: tuple[int, ...] | None = None


class MemberCollectives:
    """The collectives of all members of a group. Each calls the same method, and gets a ref of its result at once.

    `await` the ref, or in a `def` method use `.result()`. Members meet by `key`, so collectives with different keys may
    be called in any order, at the same time, and in groups that share members: they do not wait for each other. (A
    member that awaits one before it calls the next takes part in that one later.) The same key may be used again; a
    member that is ahead waits in the next collective with that key.

    They may be called in any thread of the actor. A thread that belongs to no call, such as one of autograd, takes part
    for the call that has asked for this object, `current_group()`.

    In a call of `all`, `each` or `split` of a `Group`, or of members that are called as one, a collective only meets
    those of the same call at the other members; in a run of a compiled graph, only those of the same run. So these may
    be under way at the same time with the same keys. All else meets by the key and the order of calls at each member:
    calls of single members, also by `any` or `map`, of a slice, and tasks that outlive the call that made them.

    Do not write to the value before the result is there. A member's own value in its result may be that object itself;
    all else is new. Results equal those of the collectives on refs: all members get the same bits.

    Each method takes:
        key: A string, an integer, or a tuple of these. Without a key, the n-th call of each member belongs to the n-th
            calls of the others: then all members have to call in one order, all collectives without a key together.
        out: A tensor or an array of the kind of the result, which is written to and is the result; where that is a
            list, a list of these. It may be the value.
        timeout: Seconds that this member waits for the others to come, counted from its call. When the time of one is
            over, the collective fails at all members. The member where they meet notes the time; if that one does not
            answer either, those that wait for it give up 5 seconds later.

    All of them raise the following. For awaiting a result:
        ValueError: The members disagree on the operation, the op, the root, the type, the dtype or the shape; or the
            value of one cannot travel, be reduced or be cut. The error names the key and ranks; all members get it.
        TimeoutError: Members did not come in time; it names their ranks. All members get it, late ones when they come.
        CallCancelled: A member stopped waiting before all had come; it names its rank. All members get it likewise.
        ActorDied: A member died or was stopped before the result was there. If one died while large values were on
            their way, also OwnerDied or CallCancelled.
        GroupChanged: The group got a new epoch meanwhile; `current_group()` gives it.
    At once:
        GroupChanged: This object is of an earlier epoch: `current_group()` gives the group as it is now.
        TypeError: The key is of another type.
        ValueError: There is no such op or root, the timeout is negative, or there are not as many lengths as members.
        RuntimeError: This is a constructor, or the actor of this object has ended.

    The restart of a supervised member gives the group a new epoch, in which members begin anew: collectives that are
    open at the death end with ActorDied or GroupChanged, by the news that comes first, and those that begin after that
    with GroupChanged.

    Cancellation of a result (also by `asyncio.timeout` or a deadline): if not all have come, the collective ends for
    all of them with a CallCancelled that names the member; else the member has taken part, and the others get their
    results. Until they have them, it must not write to its value. A member that never awaits the result has taken part,
    too. If the call of the member that has begun it fails or is cancelled before all have come, the member has not
    taken part, and the result raises CallCancelled. So it does if, of one call of the group (`all`, `each` or `split`),
    the call of another member fails.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        """The number of members."""
        raise NotImplementedError

    def _take_part(self, operation: str, value: Any, how: How) -> Ref[Any]:
        raise NotImplementedError

    def all_reduce(
        self, value: T, op: Op[T] = "sum", *, key: Key = None, timeout: float | None = None, out: T | None = None
    ) -> Ref[T]:
        """Combine the values of all members in the order of ranks; each member gets the result.

        Args:
            value: A tensor or an array, of one dtype and shape at all members, or a number; with a function, anything.
            op: "sum", "product", "min", "max", a function of two values, which must not change them, or an `OfAll`.
            key: See the class.
            timeout: See the class.
            out: See the class.
        """
        return self._take_part("all_reduce", value, How(key, timeout, out, check_reducer(op)))

    def reduce(
        self,
        value: T,
        op: Op[T] = "sum",
        *,
        root: int = 0,
        key: Key = None,
        timeout: float | None = None,
        out: T | None = None,
    ) -> Ref[T | None]:
        """Combine the values as `all_reduce` does; the member with rank `root` gets the result, the others None."""
        return self._take_part("reduce", value, How(key, timeout, out, check_reducer(op), root))

    def reduce_scatter(
        self,
        value: T,
        op: Op[T] = "sum",
        *,
        lengths: Sequence[int] | None = None,
        key: Key = None,
        timeout: float | None = None,
        out: T | None = None,
    ) -> Ref[T]:
        """Combine tensors or arrays; member i gets part i of the result, cut along its first dimension.

        The parts are those of `torch.tensor_split`: the first ones are longer by one if the length cannot be divided.
        With `lengths`, the same at all members, part i has length i of these.
        """
        parts = None if lengths is None else tuple(map(int, lengths))
        return self._take_part("reduce_scatter", value, How(key, timeout, out, check_reducer(op), lengths=parts))

    def all_gather(
        self, value: T, *, key: Key = None, timeout: float | None = None, out: list[T] | None = None
    ) -> Ref[list[T]]:
        """Give each member the list of the values of all. They may be of different kinds."""
        return self._take_part("all_gather", value, How(key, timeout, out))

    def gather(
        self, value: T, *, root: int = 0, key: Key = None, timeout: float | None = None, out: list[T] | None = None
    ) -> Ref[list[T] | None]:
        """Give the member with rank `root` the list of the values of all; the others get None."""
        return self._take_part("gather", value, How(key, timeout, out, root=root))

    def broadcast(
        self,
        value: T | None = None,
        *,
        root: int = 0,
        key: Key = None,
        timeout: float | None = None,
        out: T | None = None,
    ) -> Ref[T]:
        """Give each member the value of the one with rank `root`; values of the others are ignored."""
        return self._take_part("broadcast", value, How(key, timeout, out, root=root))

    def scatter(
        self,
        items: Sequence[T] | None = None,
        *,
        root: int = 0,
        key: Key = None,
        timeout: float | None = None,
        out: T | None = None,
    ) -> Ref[T]:
        """Give member i item i of the list of the member with rank `root`; lists of the others are ignored."""
        return self._take_part("scatter", items, How(key, timeout, out, root=root))

    def all_to_all(
        self, items: Sequence[T], *, key: Key = None, timeout: float | None = None, out: list[T] | None = None
    ) -> Ref[list[T]]:
        """Exchange items: each member has one item for each member, and gets the list of those for it, by rank.

        Tensors may have any lengths.
        """
        return self._take_part("all_to_all", items, How(key, timeout, out))

    def barrier(self, *, key: Key = None, timeout: float | None = None) -> Ref[None]:
        """Wait until all members have called it."""
        return self._take_part("barrier", None, How(key, timeout))


def plain_key(key: object) -> Key:
    """The key of plain strings and integers: members with equal keys have to meet at one place.

    Raises:
        TypeError: This can be no key.
    """
    try:
        return None if key is None else _plain(key)
    except TypeError:
        raise TypeError(f"key={key!r:.80}: a key is a string, an integer, or a tuple of these") from None


def _plain(key: object) -> str | int | tuple[Any, ...]:
    match key:
        case tuple():
            return tuple(map(_plain, key))
        case str():
            return str.__str__(key)
        case int():
            return int.__int__(key)
        case _:
            raise TypeError
