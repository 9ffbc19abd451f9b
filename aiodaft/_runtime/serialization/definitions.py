"""Classes and functions that other processes cannot import, under names of their own.

They are pickled by value once. A value that has them, or their instances, has only the name; see
`_protocol.definitions`. What may change without its name being told again is not named: a class with a list among its
attributes, or a function that uses a global one. Such things are pickled by value each time, as they are then.
"""

from __future__ import annotations

import dataclasses
import dis
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from aiodaft._protocol.connections.messages import INLINE_LIMIT
from aiodaft._runtime.serialization.pickling import importable
from aiodaft.actor import Actor

Thing: TypeAlias = type | FunctionType

# Gives what something refers to, to be compared with what it was; holds no class or function.
_Look: TypeAlias = Callable[[], list[Any]]


class Named(NamedTuple):
    """A class or function of this process under its name."""

    thing: Thing
    name: bytes
    # It is pickled by value.
    source: bytes


class Definition:
    """A class or function that another process told this one."""

    __slots__ = ("made", "source")

    def __init__(self, source: bytes) -> None:
        self.source = source
        # What was made of it: lives as long as the other process may send its name.
        self.made: Thing | None = None


class _Record(NamedTuple):
    """What is remembered of a class or function."""

    token: bytes
    name: bytes
    source: bytes
    looks: list[tuple[_Look, list[Any]]]

    @property
    def holds(self) -> bool:
        """Whether it is what it was when it was pickled."""
        for look, before in self.looks:
            now = look()
            if len(now) != len(before):
                return False
            for value, known in zip(now, before, strict=True):
                if value is not known and not (type(known) is ref and known() is value):
                    return False
        return True


# None: it has no name.
_records: Final[WeakKeyDictionary[Thing, _Record | None]] = WeakKeyDictionary()
_by_name: Final[WeakValueDictionary[bytes, Thing]] = WeakValueDictionary()


def named(thing: Thing) -> Named | None:
    """The name of a class or function; None if it has to be pickled by value."""
    record = _records.get(thing)
    if record is None or not record.holds:
        if record is None and thing in _records:
            return None
        looks = _looks_at(thing)
        if looks is None:
            _records[thing] = None
            return None
        from hashlib import blake2b  # noqa: PLC0415 - slow to import, and few calls need it

        import cloudpickle  # noqa: PLC0415 - as above

        source = cloudpickle.dumps(thing, protocol=5)
        if len(source) > INLINE_LIMIT:
            _records[thing] = None
            return None
        # Two functions of the same text have two names: each is taken back when its own function is gone.
        token = os.urandom(8) if record is None else record.token
        name = blake2b(token + source, digest_size=16).digest()
        record = _records[thing] = _Record(token, name, source, looks)
        _by_name[name] = thing
    return Named(thing, record.name, record.source)


def name_of(thing: Thing) -> bytes:
    """The name that `named` gave last."""
    record = _records[thing]
    assert record is not None
    return record.name


def find(name: bytes, heard: Mapping[bytes, Definition]) -> Any:
    """The class or function that has a name."""
    thing = _by_name.get(name)
    if thing is None:
        definition = heard[name]
        thing = pickle.loads(definition.source)
        # A class that has changed at its sender, or that comes back, is still one class here.
        earlier = _records.get(thing)
        if earlier is not None:
            _by_name.pop(earlier.name, None)
        if thing not in _records:
            # No more than one holds it: two processes that told each other would hold it for ever.
            definition.made = thing
        looks = _looks_at(thing)
        _records[thing] = None if looks is None else _Record(os.urandom(8), name, definition.source, looks)
        _by_name[name] = thing
    return thing


# What a class or function refers to, and whether that may change unseen.


@dataclasses.dataclass
class _Sample:
    """An object of no use but for the code of its methods."""


# Its function has a set of its own, which is empty between calls.
_REPR: Final = _Sample.__repr__.__code__
_FROZEN: Final = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    range,
    CodeType,
    ModuleType,
    BuiltinFunctionType,
    Enum,
)
_SLOTS: Final = (MemberDescriptorType, GetSetDescriptorType)
# What the interpreter, dataclasses and abstract classes keep in a class: made with the class, and not changed after.
_MADE_WITH_CLASS: Final = frozenset({
    "__dict__", "__weakref__", "__annotations__", "__dataclass_fields__", "__dataclass_params__", "__slotnames__",
    "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl", "__annotate_func__",
    "__annotations_cache__", "__annotate__", "__type_params__",
})  # fmt: skip
_REBINDS_GLOBAL: Final = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_REBINDS_FREE: Final = {"STORE_DEREF", "DELETE_DEREF"}


class _Changeable(Exception):
    """It may change unseen."""


def _looks_at(thing: Thing) -> list[tuple[_Look, list[Any]]] | None:
    """How to see whether something has changed; None if that cannot be seen."""
    survey = _Survey()
    try:
        survey.thing(thing)
    except _Changeable:
        return None
    return survey.looks


class _Survey:
    def __init__(self) -> None:
        self.looks: list[tuple[_Look, list[Any]]] = []
        self._seen: set[int] = set()

    def values(self, values: Iterable[Any]) -> None:
        """Look at what a class or function refers to."""
        for value in values:
            if isinstance(value, type | FunctionType) and not importable(value):
                self.thing(value)
            elif not _is_frozen(value):
                raise _Changeable

    def thing(self, thing: Thing) -> None:
        """Look at a class or function."""
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if isinstance(thing, type):
            self._class(thing)
        else:
            self._function(thing)

    def _class(self, cls: type) -> None:
        if issubclass(cls, Actor | Enum):
            raise _Changeable
        names = [name for name, member in vars(cls).items() if not _is_made_with(name, member)]
        length, found = len(vars(cls)), ref(cls)

        def look() -> list[Any]:
            living: Any = found()
            now = vars(living)
            refers = [type(living), *living.__bases__, len(now) == length]
            for name in names:
                member = now.get(name)
                if isinstance(member, property):
                    refers += (member.fget, member.fset, member.fdel)
                else:
                    refers.append(member.__func__ if isinstance(member, staticmethod | classmethod) else member)
            return refers

        self.values(look())
        self._note(look)

    def _function(self, function: FunctionType) -> None:
        if function.__code__ == _REPR:
            self.values((function.__dict__["__wrapped__"],))
            return
        codes = list(_codes_in(function.__code__))
        free = function.__code__.co_freevars
        for step in (step for code in codes for step in dis.get_instructions(code)):
            if step.opname in _REBINDS_GLOBAL or (step.opname in _REBINDS_FREE and step.argval in free):
                raise _Changeable
        if function.__dict__.keys() - {"__wrapped__"}:
            # It may count its calls there.
            raise _Changeable
        names = {name for code in codes for name in code.co_names}
        scope, found = function.__globals__, ref(function)
        used = sorted(names & scope.keys())

        def look() -> list[Any]:
            now: Any = found()
            defaults = (*(now.__defaults__ or ()), *(now.__kwdefaults__ or {}).values())
            refers = [now.__code__, *defaults, *now.__dict__.values(), *map(scope.get, used)]
            return refers + [cell.cell_contents for cell in now.__closure__ or ()]

        self.values(look())
        self._note(look)

    def _note(self, look: _Look) -> None:
        # No class or function: what is remembered of one must not keep it alive.
        self.looks.append((look, [ref(now) if isinstance(now, type | FunctionType) else now for now in look()]))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes_in(inner)


def _is_frozen(value: Any) -> bool:
    """Whether a value never changes; a tuple of classes would keep them alive, if it was remembered."""
    if isinstance(value, tuple | frozenset):
        return all(_is_frozen(part) for part in value)
    if isinstance(value, type | FunctionType):
        return importable(value)
    return isinstance(value, _FROZEN) or type(value).__module__ == "dataclasses"


def _is_made_with(name: str, member: Any) -> bool:
    return name in _MADE_WITH_CLASS or isinstance(member, _SLOTS)
