"""The classes and functions that get a name, the changes that give them another, and their users."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import gc
import math
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import aiodaft
from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.definitions import Definition, find, named
from aiodaft._runtime.serialization.scripts import mark_of
from aiodaft._runtime.serialization.small import NAMED, encode_small

SCALE = 2
ITEMS: list[int] = []
COUNT = 0


def has_name(thing: Any) -> bool:
    return named(thing) is not None


def test_what_cannot_change_unseen_has_a_name() -> None:
    @dataclasses.dataclass(order=True)
    class Base:
        left: int
        right: list[int] = dataclasses.field(default_factory=list)

        @property
        def area(self) -> float:
            total = 0.0

            def add(part: float) -> None:
                nonlocal total
                total += part

            add(math.pi * self.left)
            return total

        @staticmethod
        def scale() -> int:
            return SCALE

        @classmethod
        def make(cls) -> Base:
            return cls(1)

    class Derived(Base):
        kinds = (int, str)

        def __repr__(self) -> str:
            return f"derived {super().__repr__()}"

    assert has_name(Base)
    assert has_name(Derived)
    assert has_name(lambda: SCALE)


def test_what_may_change_unseen_has_none() -> None:
    shared: list[int] = []
    count = 0

    class HasList:
        items = shared

    class UsesList:
        def size(self) -> int:
            return len(shared)

    class Counts:
        def size(self) -> int:
            nonlocal count
            count += 1
            return count

    class Cached:
        @functools.cached_property
        def cached(self) -> int:
            return 1

    class Derived(HasList):
        pass

    class Counter(aiodaft.Actor):
        pass

    def noted() -> None:
        pass

    noted.calls = 0  # type: ignore[attr-defined]

    def count_calls() -> None:
        global COUNT  # noqa: PLW0603 - the subject of the test
        COUNT += 1

    for thing in (
        HasList,
        UsesList,
        Counts,
        Cached,
        Derived,
        Counter,
        noted,
        count_calls,
        lambda: ITEMS,
        lambda: shared,
    ):
        assert not has_name(thing)


def test_a_change_gives_another_name_and_changing_back_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local:
        def size(self) -> int:
            return SCALE

    first, again = named(Local), named(Local)
    assert first is not None
    assert first == again
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "SCALE", 3)
        second = named(Local)
        assert second is not None
        assert second.name != first.name
    assert named(Local) == first
    Local.extra = 1  # type: ignore[attr-defined]
    third = named(Local)
    assert third is not None
    assert third.name not in (first.name, second.name)


def test_other_code_or_defaults_of_a_function_give_another_name() -> None:
    def scaled(value: int, scale: int = 2) -> int:
        return value * scale

    def shifted(value: int, scale: int = 2) -> int:
        return value + scale

    holder = type("Holder", (), {"scaled": staticmethod(scaled)})
    names = {name_of_class(holder)}
    scaled.__defaults__ = (3,)
    names.add(name_of_class(holder))
    scaled.__code__ = shifted.__code__
    names.add(name_of_class(holder))
    assert len(names) == 3


def name_of_class(cls: type) -> bytes:
    known = named(cls)
    assert known is not None
    return known.name


class Unit(str):
    """A subclass may change a builtin's behaviour."""

    __slots__ = ()


def test_what_is_built_of_things_that_may_change_unseen_has_no_name() -> None:
    module, unit = types.ModuleType("made_here"), Unit("m")

    class Scales(enum.Enum):
        SMALL = [1]  # noqa: RUF012 - the subject of the test

    class OfScale:
        scale = Scales.SMALL

    for thing in (lambda: module, lambda: unit, OfScale):
        assert not has_name(thing)
    assert has_name(lambda: sys)


def test_a_change_of_what_a_class_uses_gives_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kind(enum.Enum):
        NEAR = 1

        def size(self) -> int:
            return SCALE

        @property
        def double(self) -> int:
            return 2

    @dataclasses.dataclass
    class Place:
        kind: Kind = Kind.NEAR

        def size(self) -> int:
            return len(LATER)  # type: ignore[name-defined]  # noqa: F821 - the subject of the test

        # A name of an attribute is no global one.
        def items(self) -> Any:
            return self.ITEMS  # type: ignore[attr-defined]

    class Shape(abc.ABC):  # noqa: B024 - the subject of the test
        pass

    here = sys.modules[__name__]
    changes: list[tuple[type, Callable[[], object]]] = [
        (Place, lambda: monkeypatch.setattr(here, "LATER", None, raising=False)),
        (Place, lambda: monkeypatch.setattr(here, "len", lambda x: 1, raising=False)),
        (Place, lambda: monkeypatch.setattr(here, "SCALE", 3)),
        (Place, lambda: setattr(Kind, "double", property(lambda self: 3))),
        (Shape, lambda: Shape.register(Unit)),
    ]
    for cls, change in changes:
        before = name_of_class(cls)
        change()
        assert name_of_class(cls) != before


def test_what_changes_often_is_pickled_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled() -> int:
        return SCALE

    thing: Any = scaled
    names = set()
    for scale in range(1000, 1100):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", scale)
        known = named(thing)
        names.add(known and known.name)
    # Each name is kept where it was told until the function is gone.
    assert len(names - {None}) <= 10
    assert None in names


def test_a_name_keeps_no_namespace_alive() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Made:\n    def size(self):\n        return SIZE\nSIZE = 1", namespace)
    found = weakref.ref(namespace["Made"])
    assert has_name(namespace["Made"])
    del namespace
    gc.collect()
    assert found() is None


def test_a_name_keeps_nothing_alive() -> None:
    @dataclasses.dataclass
    class Local:
        left: int

        def __hash__(self) -> int:
            return super().__hash__()

    found = weakref.ref(Local)
    assert has_name(Local)
    del Local
    gc.collect()
    assert found() is None


def test_a_class_is_made_once_and_kept_by_what_was_heard() -> None:
    def define() -> tuple[bytes, bytes]:
        @dataclasses.dataclass
        class Local:
            left: int

        known = named(Local)
        assert known is not None
        return known.name, known.source

    name, source = define()
    gc.collect()
    heard = {name: Definition(source)}
    made = find(name, heard)
    assert find(name, heard) is made
    again = named(made)
    assert again is not None
    assert again.name == name
    made = weakref.ref(made)
    del again
    gc.collect()
    assert made() is not None
    heard.clear()
    gc.collect()
    assert made() is None


def test_a_function_of_main_goes_by_its_name_and_a_lambda_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(x: int) -> int:
        return x + 1

    helper.__module__, helper.__qualname__ = "__main__", "helper"
    assert encode_small((helper,), by_name=True) is None
    monkeypatch.setattr(sys.modules["__main__"], "helper", helper, raising=False)
    small = encode_small(([helper, 1],), by_name=True)
    assert small is not None
    payload, defined = small
    assert payload[0] == NAMED
    assert [each.thing for each in defined] == [helper]
    assert decode(payload) == [helper, 1]
    assert encode_small((helper,), by_name=False) is None
    # It is made for one call.
    assert encode_small((lambda: 1,), by_name=True) is None


def test_a_function_has_changed_with_its_attributes() -> None:
    def limited() -> None:
        """A function that keeps a setting."""

    vars(limited)["limit"] = 3
    before = mark_of(limited)
    assert mark_of(limited) == before
    vars(limited)["limit"] = 10
    assert mark_of(limited) != before
