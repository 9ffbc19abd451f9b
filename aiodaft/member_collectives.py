"""Collectives in the methods of a group: `await group.all_reduce(x, key="loss")`, called by every member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from aiodaft._runtime.groups.collectives import OfAll, check_reducer
from aiodaft.ref import Ref

__all__ = ["How", "Key", "MemberCollectives"]

T = TypeVar("T")

Key: TypeAlias = str | int | tuple[Any, ...] | None
Op: TypeAlias = Literal["sum", "product", "min", "max"] | Callable[[T, T], T] | OfAll[T, T]


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
