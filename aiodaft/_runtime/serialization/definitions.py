"""Classes and functions that other processes cannot import, under names of their own.

They are pickled by value once. A value that has them, or their instances, has only the name; see
`_protocol.connections.session`. Objects that may change without a new name are pickled by value each time, as they are
then: a class with a list among its attributes, or a function that uses a global one. So are objects that change often:
each name that was told stays in other processes until the class or function is gone.
"""

from __future__ import annotations

import dataclasses
import dis
import os
import pickle
import sys
from abc import get_cache_token
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from itertools import repeat
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakValueDictionary, ref

from aiodaft._protocol.connections.messages import INLINE_LIMIT
from aiodaft._runtime.process import refuses_pickle
from aiodaft._runtime.serialization.scripts import codes_in, globals_used, importable
from aiodaft.actor import Actor
from aiodaft.exceptions import SpawnFailed


class Origin(NamedTuple):
    file: str
    digest: bytes


def origin_of(cls: type) -> Origin | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not file.endswith(".py") or not importable(cls):
        return None
    try:
        status = os.stat(file)
        return Origin(file, _digest_of(file, status.st_mtime_ns, status.st_size))
    except OSError:
        return None


@lru_cache(maxsize=1024)
def _digest_of(file: str, mtime: int, size: int) -> bytes:
    from hashlib import sha256  # noqa: PLC0415 - takes long to import, and a runtime of one machine does not need it

    with open(file, "rb") as source:
        return sha256(source.read()).digest()


def check_origin(cls: type, sent: Origin, label: str, node: str) -> None:
    """Raise SpawnFailed if a class that another process has sent by its name is another one here."""
    here = origin_of(cls)
    if here is not None and here.digest != sent.digest:
        raise SpawnFailed(
            f"{label} cannot be made on {node}: {cls.__module__} is {here.file} there, which differs from {sent.file} "
            "of the program. Send that with `await rt.ship(...)`, or install the same on every machine"
        )


Thing: TypeAlias = type | FunctionType

_MOST_CHANGES: Final = 8


class Named(NamedTuple):
    thing: Thing
    name: bytes
    source: bytes


class Definition:
    __slots__ = ("made", "source")

    def __init__(self, source: bytes) -> None:
        self.source = source
        # The object that was made of it: lives as long as the other process may send its name.
        self.made: Thing | None = None


NONE_HEARD: Final[Mapping[bytes, Definition]] = MappingProxyType({})


class _Record:
    __slots__ = ("_before", "_gone", "_kept", "_look", "changes", "name", "source", "token")

    def __init__(self, token: bytes, source: bytes, name: bytes, survey: _Survey, changes: int = 0) -> None:
        self.token = token
        self.source = source
        self.name = name
        self.changes = changes
        self._look = survey.look
        found = survey.look()
        # Only the identities of classes and functions: it must not keep them alive. When one of them is gone, another
        # object may get its identity.
        self._gone: list[object] = []
        self._before = list(map(id, found))
        frozen = [value for value in found if id(value) not in survey.skipped]
        things = [type(value) if isinstance(value, Enum) else value for value in frozen]
        self._kept = [
            ref(thing, self._gone.append) if isinstance(thing, type | FunctionType) else thing for thing in things
        ]

    def holds(self) -> bool:
        return not self._gone and list(map(id, self._look())) == self._before


# By weak references. None: it has no name.
_records: Final[dict[ref[Thing], _Record | None]] = {}
_by_name: Final[WeakValueDictionary[bytes, Thing]] = WeakValueDictionary()


def named(thing: Thing) -> Named | None:
    """None: it has to be pickled by value."""
    key = ref(thing)
    record = _records.get(key)
    if record is None or not record.holds():
        if record is None and key in _records:
            return None
        record = _records[ref(thing, _records.pop)] = _recorded(thing, record)
        if record is None:
            return None
        _by_name[record.name] = thing
    return Named(thing, record.name, record.source)


def _recorded(thing: Thing, earlier: _Record | None) -> _Record | None:
    changes = 0 if earlier is None else earlier.changes + 1
    survey = _surveyed(thing)
    if survey is None or changes > _MOST_CHANGES:
        return None
    from hashlib import blake2b  # noqa: PLC0415 - slow to import, and few calls need it

    from aiodaft._runtime.serialization.code_pickler import pickle_code  # noqa: PLC0415 - the same

    source = pickle_code(thing)
    if len(source) > INLINE_LIMIT:
        return None
    # Two functions of the same text have two names: each is taken back when its own function is gone.
    token = os.urandom(8) if earlier is None else earlier.token
    return _Record(token, source, blake2b(token + source, digest_size=16).digest(), survey, changes)


def find(name: bytes, heard: Mapping[bytes, Definition]) -> Any:
    thing = _by_name.get(name)
    if thing is None:
        definition = heard[name]
        if refuses_pickle():
            raise TypeError('it has code that was sent, which Runtime(codec="msgpack") refuses')
        thing = pickle.loads(definition.source)
        # A class that has changed at its sender, or that comes back, is still one class here.
        key = ref(thing)
        earlier = _records.get(key)
        if earlier is not None:
            _by_name.pop(earlier.name, None)
        if key not in _records:
            # No more than one holds it: two processes that told each other would hold it for ever.
            definition.made = thing
        survey = _surveyed(thing)
        record = None if survey is None else _Record(os.urandom(8), definition.source, name, survey)
        _records[ref(thing, _records.pop)] = record
        _by_name[name] = thing
    return thing


@dataclasses.dataclass
class _Sample:
    pass


# Its function has a set of its own, which is empty between calls.
_REPR: Final = _Sample.__repr__.__code__
_ABSENT: Final = range(0)
_FROZEN: Final = frozenset({
    int, bool, float, complex, str, bytes, type(None), type(...), range, CodeType, BuiltinFunctionType,
})  # fmt: skip
# Their parts do not change.
_WRAPPERS: Final[Mapping[type, Callable[[Any], tuple[Any, ...]]]] = {
    property: lambda member: (member.fget, member.fset, member.fdel),
    staticmethod: lambda member: (member.__func__,),
    classmethod: lambda member: (member.__func__,),
}
_SLOTS: Final = (MemberDescriptorType, GetSetDescriptorType)
# Attributes that the interpreter, dataclasses and abstract classes keep in a class: made with the class, and not
# changed after.
_MADE_WITH_CLASS: Final = frozenset({
    "__dict__", "__weakref__", "__annotations__", "__dataclass_fields__", "__dataclass_params__", "__slotnames__",
    "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl", "__annotate_func__",
    "__annotations_cache__", "__annotate__", "__type_params__",
})  # fmt: skip
_REBINDS_GLOBAL: Final = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_REBINDS_FREE: Final = {"STORE_DEREF", "DELETE_DEREF"}


class _Changeable(Exception):
    """It may change unseen."""


def _surveyed(thing: Thing) -> _Survey | None:
    survey = _Survey()
    try:
        survey.follow(thing)
    except _Changeable:
        return None
    return survey


class _Survey:
    def __init__(self) -> None:
        self._classes: list[tuple[ref[type], list[str], list[str]]] = []
        # Each with the names of the globals that it uses.
        self._functions: list[tuple[ref[FunctionType], Sequence[str]]] = []
        # Classes may be registered with an abstract one.
        self._registered: object = None
        # Not looked at, because they do not change; they may keep a class alive.
        self.skipped: set[int] = set()
        self._seen: set[int] = set()

    def look(self) -> list[Any]:
        """The objects that they refer to. One function, because it runs for each value that has a name."""
        refers: list[Any] = []
        if self._registered is not None:
            refers.append(get_cache_token() == self._registered)
        for found_class, wrapped, members in self._classes:
            cls: Any = found_class()
            now = vars(cls)
            refers.append(type(cls))
            refers += cls.__bases__
            refers += now.values()
            for name in wrapped:
                member = now.get(name)
                parts = _WRAPPERS.get(type(member))
                refers += () if parts is None else parts(member)
            for name in members:
                refers.append(cls._member_map_[name]._value_)
        for found, used in self._functions:
            function: Any = found()
            refers.append(function.__code__)
            refers += function.__defaults__ or ()
            refers += function.__dict__.values()
            # A name of the builtins may become a global one.
            if used:
                refers += map(function.__globals__.get, used, repeat(_ABSENT))
            if function.__kwdefaults__:
                refers += function.__kwdefaults__.values()
            for cell in function.__closure__ or ():
                refers.append(cell.cell_contents)
        return refers

    def follow(self, thing: Thing) -> None:
        self._seen.add(id(thing))
        fresh = [thing]
        while fresh:
            for each in fresh:
                if isinstance(each, type):
                    self._take_class(each)
                else:
                    self._take_function(each)
            fresh = [found for value in self.look() if (found := self._unseen(value)) is not None]

    def _unseen(self, value: Any) -> Thing | None:
        if isinstance(value, Enum) and not importable(type(value)):
            value = type(value)
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        if isinstance(value, type | FunctionType) and not importable(value):
            return value
        if not _is_frozen(value):
            raise _Changeable
        return None

    def _take_class(self, cls: type) -> None:
        if issubclass(cls, Actor):
            raise _Changeable
        # The other attributes of an enumeration are made of its members.
        members: list[str] = list(getattr(cls, "_member_map_", ()))
        wrapped = [name for name, member in vars(cls).items() if type(member) in _WRAPPERS]
        skipped = {
            id(member)
            for name, member in vars(cls).items()
            if name in wrapped or (type(member) is not FunctionType if members else _is_made_with(name, member))
        }
        self.skipped |= skipped
        self._seen |= skipped
        if "_abc_impl" in vars(cls):
            self._registered = get_cache_token()
        self._classes.append((ref(cls), wrapped, members))

    def _take_function(self, function: FunctionType) -> None:
        if function.__code__ == _REPR:
            function = function.__dict__["__wrapped__"]
        free = function.__code__.co_freevars
        for step in (step for code in codes_in(function.__code__) for step in dis.get_instructions(code)):
            if step.opname in _REBINDS_GLOBAL or (step.opname in _REBINDS_FREE and step.argval in free):
                raise _Changeable
        if function.__dict__.keys() - {"__wrapped__"}:
            # It may count its calls there.
            raise _Changeable
        self._functions.append((ref(function), globals_used(function.__code__)))


def _is_frozen(value: Any) -> bool:
    """Whether a value never changes; a tuple of classes would keep them alive, if it was remembered."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(_is_frozen, value))
    if isinstance(value, type | FunctionType):
        return importable(value)
    if isinstance(value, ModuleType):
        return sys.modules.get(value.__name__) is value
    return kind in _FROZEN or (isinstance(value, Enum) and importable(kind)) or kind.__module__ == "dataclasses"


def _is_made_with(name: str, member: Any) -> bool:
    return name in _MADE_WITH_CLASS or isinstance(member, _SLOTS)
