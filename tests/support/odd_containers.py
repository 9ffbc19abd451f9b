"""Containers and records of many kinds, and an actor that has a ref in one."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from aiodaft import Actor, method


class Listing(list[Any]):
    """A list of its own kind, with attributes."""


class Slotted(list[Any]):
    """A list with a slot."""

    __slots__ = ("note",)
    note: Any


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: int


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A record that nothing can change."""

    value: Any


@dataclasses.dataclass
class Titled(dict[str, Any]):
    """A dict that is a record, too."""

    title: str


class Struct(msgspec.Struct, kw_only=True):
    """A record of msgspec."""

    value: Any


def _with(made: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _titled(one: Any) -> Titled:
    made = Titled("title")
    made["a"] = one
    return made


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda one: {one: one},
    "set": lambda one: {one, "b"},
    "frozenset": lambda one: frozenset([one]),
    "OrderedDict": lambda one: OrderedDict(b=2, a=one),
    "defaultdict": lambda one: defaultdict(list, {"a": one}),
    "Counter": lambda one: Counter({"a": one}),
    "UserDict": lambda one: UserDict({"a": one}),
    "UserList": lambda one: UserList([one]),
    "SimpleNamespace": lambda one: SimpleNamespace(a=one),
    "deque": lambda one: deque([0, one, 2], 3),
    "list with attributes": lambda one: _with(Listing([one, (one,)]), seen=one),
    "list with slots": lambda one: _with(Slotted(), note=one),
    "named tuple": lambda one: Point(one, 2),
    "frozen dataclass": lambda one: Frozen({"a": one}),
    "dataclass that is a dict": _titled,
    "msgspec": lambda one: Struct(value=one),
}
with suppress(ImportError):
    # Optional packages.
    import attrs
    import pydantic

    class Model(pydantic.BaseModel):
        """A record of pydantic."""

        a: Any
        b: int = 2

    @attrs.frozen
    class Attributes:
        """A record of attrs."""

        a: Any

    CONTAINERS["pydantic"] = lambda one: Model(a=[one])
    CONTAINERS["attrs"] = lambda one: Attributes((one,))


def facts(value: Any) -> tuple[Any, ...]:
    """A container or record in parts that are equal if it is."""
    options = (getattr(value, name, None) for name in ("maxlen", "default_factory", "note", "__dict__"))
    return type(value), value, *options


class Packer(Actor):
    """Passes a container with a ref to a neighbour."""

    @method
    async def pass_on(self, kind: str, echo: Any) -> Any:
        return await echo.echo(CONTAINERS[kind](echo.echo(1)))
