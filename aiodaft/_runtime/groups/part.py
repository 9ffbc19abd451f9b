"""What one member does in a keyed collective."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from aiodaft._protocol.groups.collective import values_of
from aiodaft._protocol.groups.roster import Roster
from aiodaft._runtime.actors.enlisted import Standing
from aiodaft._runtime.groups.arithmetic import Reducer, kind_of

# Names the axes of `along`, one use of it after another.
Along = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one member does in a collective.

    Attributes:
        operation: The name of the collective.
        key: Tells it from others of the group.
        roster: The group, or the part of it.
        along: The axes by which that is a part of the whole group.
        rank: The member.
        standing: Its place in the whole group.
        op: How values are reduced.
        root: The rank that alone has a value or gets a result, if that is so.
        timeout: Seconds that the others may be late.
    """

    operation: str
    key: Hashable
    roster: Roster[Any]
    along: Along
    rank: int
    standing: Standing
    op: Reducer
    root: int
    timeout: float | None

    @property
    def label(self) -> str:
        return self.operation if self.key is None else f"{self.operation} {self.key!r}"

    @property
    def title(self) -> str:
        """What errors call the collective."""
        return f"{self.label} of {self.roster.id}"

    @property
    def reduces(self) -> bool:
        return self.operation in {"all_reduce", "reduce", "reduce_scatter"}

    @property
    def has_value(self) -> bool:
        return self.operation != "barrier" and self.rank in values_of(self.operation, self.roster.size, self.root)

    def terms(self, value: Any) -> dict[str, Hashable]:
        """What all members have to agree on."""
        terms: dict[str, Hashable] = {"operation": self.operation, "root": self.root}
        if self.reduces:
            op = self.op
            terms["op"] = _name_of(op) if callable(op) else op
            terms["value"] = kind_of(value)
        return terms

    @property
    def meets_at(self) -> int:
        """The rank where members meet: keys spread the work."""
        return crc32(repr(self.key).encode()) % self.roster.size


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function; of another callable, that of its class."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
