"""The part of one member in a keyed collective, and its message to the one where they meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

from aiodaft._protocol.groups.collective import values_of
from aiodaft._protocol.groups.meeting import Coming
from aiodaft._protocol.groups.roster import Roster, Steps
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.actors.enlisted import Standing
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.graphs.captured_call import Opaque
from aiodaft._runtime.groups.arithmetic import Reducer, kind_of
from aiodaft.exceptions import DaftError


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one member in a collective.

    Attributes:
        operation: The name of the collective.
        key: Tells it from others of the group.
        roster: The group, or the part of it.
        steps: By which that is a part of the whole group.
        rank: The member.
        standing: Its place in the whole group.
        op: The reduction of values.
        root: The rank that alone has a value or gets a result, if that is so.
        timeout: Seconds that the others may be late.
        lengths: Of `reduce_scatter`: the rows of each member. None: equal parts.
        finish: Makes the result of the value that comes. It may take long.
    """

    operation: str
    key: Hashable
    roster: Roster[Any]
    steps: Steps
    rank: int
    standing: Standing
    op: Reducer = "sum"
    root: int = 0
    timeout: float | None = None
    lengths: tuple[int, ...] | None = None
    finish: Callable[[Any], Any] | None = None

    @property
    def label(self) -> str:
        return self.operation if self.key is None else f"{self.operation} {self.key!r}"

    @property
    def title(self) -> str:
        return f"{self.label} of {self.roster.id}"

    @property
    def reduces(self) -> bool:
        return self.operation in {"all_reduce", "reduce", "reduce_scatter"}

    @property
    def has_value(self) -> bool:
        return self.operation != "barrier" and self.rank in values_of(self.operation, self.roster.size, self.root)

    def terms(self, value: Any) -> dict[str, Hashable]:
        terms: dict[str, Hashable] = {"operation": self.operation, "root": self.root}
        if self.reduces:
            op = self.op
            terms["op"] = _name_of(op) if callable(op) else op
            terms["value"] = kind_of(value)
        if self.lengths is not None:
            terms["lengths"] = self.lengths
        return terms

    @property
    def meets_at(self) -> int:
        """The rank where members meet: keys spread the work."""
        return crc32(repr(self.key).encode()) % self.roster.size


@dataclass(frozen=True)
class Joining:
    """The message of a member to the one where they meet.

    Attributes:
        at: The actor where they meet.
        group: The name of the group, or of the part of it.
        epoch: Its epoch.
        steps: As in `Part`.
        size: The number of members.
        coming: The member, and the meeting.
        timeout: As in `Part`.
        nbytes: The size of a tensor or an array.
    """

    at: int
    group: str
    epoch: int
    steps: Steps
    size: int
    coming: Coming
    timeout: float | None
    nbytes: int | None


# The form in which a value travels to the meeting and back: a small one encoded, one that is reduced there as the
# only item of a list, of others the ref. None is nothing. A result may come in a tuple, with refs of the values that
# the member makes of its own one for others.
Packed: TypeAlias = bytes | list[Any] | Opaque | tuple[Any, ...] | None


class Brought(NamedTuple):
    """The value of a member, as it came."""

    process: PeerId
    nbytes: int | None
    value: Packed


@dataclass(eq=False, slots=True)
class Joined:
    """The place where a member has joined, if it has, and the message."""

    at: tuple[PeerId, Joining] | None = None
    # It has not, because its call has failed since it has left.
    void: bool = False


@dataclass(eq=False, slots=True)
class Taking:
    """A call of `Keyed.take_part`."""

    part: Part
    # The call of the member that has begun it, and the scope inside which it meets others; as in `Coming`.
    call: InboundCall | None
    within: Hashable
    # Tells it from all others of this process.
    number: int
    # The state of the ref that the member awaits.
    outcome: Any = None
    # Set when the member where the others meet was told, or is not to be told; and the same event of this member's
    # collective with this key just before, within the same.
    told: asyncio.Event = field(default_factory=asyncio.Event)
    before: asyncio.Event | None = None
    # Whether its value exists.
    has_begun: bool = False
    # The place where it has joined.
    joined: Joined = field(default_factory=Joined)
    # Why it was withdrawn: the member has not come.
    withdrawn: DaftError | None = None
    # The others get this: the member waits no longer, while its call goes on.
    left: DaftError | None = None

    def now(self, coming: Coming, brought: Packed) -> tuple[Coming, Packed]:
        """Its message: if the member waits no longer, a fault. Raises the fault if it has not come at all."""
        if self.left is None:
            return coming, brought
        if self.joined.void:
            raise self.left
        return replace(coming, fault=self.left), None

    async def turn(self) -> None:
        """Wait for the earlier collectives of this member: the order of its calls counts, not that of their values."""
        if self.before is not None:
            await self.before.wait()


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function; of another callable, that of its class."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
