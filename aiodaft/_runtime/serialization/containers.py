"""The parts of values: walks containers and records, at any depth; builds values without pickle; takes errors apart.

Containers are lists, tuples, dicts, sets, deques, and instances of their subclasses; `UserDict`, `UserList` and
`SimpleNamespace`, too. Records are instances of dataclasses, and of classes of attrs, pydantic and msgspec.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copyreg import dispatch_table
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from itertools import chain
from types import (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    SimpleNamespace,
)
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast
from weakref import ref

from aiodaft.actor import Actor
from aiodaft.ref import Ref

FLAT: Final = frozenset({type(None), bool, int, float, str})
_ITEMS: Final = cast("tuple[Any, ...]", (list, tuple, set, frozenset, deque))
_CONTAINERS: Final[tuple[Any, ...]] = (dict, *_ITEMS, UserDict, UserList, SimpleNamespace)
_RECORDS: Final = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__", "__struct_fields__")
_have_parts: Final[dict[weakref.ref[type], bool]] = {}


def text_size(values: Iterable[Any]) -> int:
    return sum(len(value) for value in values if type(value) is str or type(value) is bytes)


def contains_ref(value: Any) -> bool:
    if isinstance(value, Ref):
        return True
    return any(contains_ref(part) for part in _parts_of(value) if type(part) not in FLAT)


def _parts_of(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind in _ITEMS:
        return cast("Iterable[Any]", value)
    if kind is dict:
        return chain(value, value.values())
    known = _have_parts.get(weakref.ref(kind))
    if not (_has_parts(kind) if known is None else known):
        return ()
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += [*dict.__iter__(value), *dict.values(value)]
    for items in _ITEMS:
        if isinstance(value, items):
            parts += items.__iter__(value)
    state: Any = object.__getstate__(value)
    for attributes in state if type(state) is tuple else (state,):
        parts += (attributes or {}).values()
    return parts


def _has_parts(cls: type) -> bool:
    marked = not issubclass(cls, Actor) and any(hasattr(cls, mark) for mark in _RECORDS)
    known = _have_parts[weakref.ref(cls, _have_parts.pop)] = marked or issubclass(cls, _CONTAINERS)
    return known


def map_refs(value: Any, replace: Callable[[Ref[Any]], Any]) -> Any:
    """Replace each ref in the containers and records of a value; other objects stay the same objects."""
    if isinstance(value, Ref):
        return replace(value)
    if not contains_ref(value):
        return value
    kind: Any = type(value)
    if kind is dict:
        return {map_refs(key, replace): map_refs(item, replace) for key, item in value.items()}
    if is_namedtuple(kind):
        return tuple.__new__(kind, [map_refs(item, replace) for item in value])
    if kind in _ITEMS and kind is not deque:
        return kind(map_refs(item, replace) for item in value)
    if is_pure_dataclass(kind):
        return rebuild_dataclass(kind, {name: map_refs(getattr(value, name), replace) for name in field_names(value)})
    return rebuild(*(map_refs(part, replace) for part in reduced(value)))


def reduced(value: Any) -> tuple[Any, ...]:
    reduce = dispatch_table.get(type(value))
    found: Any = value.__reduce_ex__(5) if reduce is None else reduce(value)
    if isinstance(found, str):
        raise TypeError(f"{type(value).__name__} has refs inside and is pickled by its name {found!r}")
    function, args, *more = found
    state, items, pairs, setter = [*more, None, None, None, None][:4]
    return function, args, state, list(items or ()), dict(pairs or ()), setter


def rebuild(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    state: Any,
    items: list[Any],
    pairs: dict[Any, Any],
    setter: Any,
) -> Any:
    made = function(*args)
    for item in items:
        made.append(item)
    for key, item in pairs.items():
        made[key] = item
    if setter is not None:
        setter(made, state)
    elif state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        attributes, slots = state if type(state) is tuple else (state, None)
        if attributes:
            made.__dict__.update(attributes)
        for name, item in (slots or {}).items():
            setattr(made, name, item)
    return made


async def resolved(value: Any, take: Callable[[Ref[Any]], Awaitable[Any]]) -> Any:
    values = {ref: await take(ref) for ref in refs_in(value)}
    return map_refs(value, values.__getitem__)


def refs_in(value: Any) -> list[Ref[Any]]:
    if isinstance(value, Ref):
        return [value]
    return [ref for part in _parts_of(value) if type(part) not in FLAT for ref in refs_in(part)]


def is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def is_pure_dataclass(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and not issubclass(cls, (BaseException, *_CONTAINERS))


def rebuild_dataclass(cls: type, fields: dict[str, Any]) -> Any:
    """Make an instance from its fields, also of a frozen class, without running `__post_init__` again."""
    instance: Any = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance


def field_names(value: Any) -> list[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    # `__post_init__` may have set further attributes.
    return [*fields, *(name for name in getattr(value, "__dict__", ()) if name not in fields)]


# Values without pickle, for `Runtime(codec="msgpack")`: dataclasses, named tuples, exceptions and members of enums of
# classes that the receiver can import are built from their parts, without a method of theirs. Objects of the runtime
# itself, such as handles, are built by functions that are marked here by `builder`.

BuilderT = TypeVar("BuilderT", bound=Callable[..., Any])

# A process that has not used them loads them when such a value comes.
_MODULES: Final = ("aiodaft.channel", "aiodaft.group", "aiodaft.service")
_builders: Final[dict[str, Callable[..., Any]]] = {}
_ALLOWED: Final[Mapping[str, Callable[[type], bool]]] = {
    "dataclass": is_dataclass,
    "named tuple": is_namedtuple,
    "enumeration": lambda cls: issubclass(cls, Enum),
    "exception": lambda cls: issubclass(cls, BaseException),
}


def builder(function: BuilderT) -> BuilderT:
    _builders[f"{function.__module__}:{function.__qualname__}"] = function
    return function


def builder_name(function: object) -> str | None:
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    return name if _builders.get(name) is function else None


def builder_named(name: str) -> Callable[..., Any]:
    module = name.partition(":")[0]
    if module in _MODULES:
        import_module(module)
    return _builders[name]


def checked(cls: Any, kind: str) -> Any:
    if not (isinstance(cls, type) and _ALLOWED[kind](cls)):
        raise TypeError(f"{cls!r:.100} is no {kind}")
    return cls


def build_error(
    cls: Any, args: list[Any], state: dict[str, Any], cause: BaseException | None, fields: Mapping[str, Any]
) -> BaseException:
    error = bare_error(checked(cls, "exception"), args, fields)
    fill_error(error, Parts(args, state, fields))
    BaseException.__dict__["__cause__"].__set__(error, cause)
    return error


def build_dataclass(cls: Any, fields: dict[str, Any]) -> Any:
    return rebuild_dataclass(checked(cls, "dataclass"), fields)


def build_namedtuple(cls: Any, items: list[Any]) -> Any:
    return tuple.__new__(checked(cls, "named tuple"), items)


def build_member(cls: Any, name: str) -> Any:
    return checked(cls, "enumeration")[name]


# The parts of an exception, and an exception made of them without code of its class.
#
# Besides `args` and `__dict__`, an exception has fields: the values that the C code of its class keeps, such as
# `OSError.filename`, and the `__slots__` of its class.

_Field: TypeAlias = MemberDescriptorType | GetSetDescriptorType

# The arguments of the constructors of these. They check it; the C code behind their fields relies on it.
_PARAMETERS: Final[Mapping[type[BaseException], tuple[str, ...]]] = {
    BaseExceptionGroup: ("message", "exceptions"),
    UnicodeDecodeError: ("encoding", "object", "start", "end", "reason"),
    UnicodeEncodeError: ("encoding", "object", "start", "end", "reason"),
    UnicodeTranslateError: ("object", "start", "end", "reason"),
}
# Of `obj`, any object of the user, pickle takes no notice either.
_LEFT_OUT: Final = AttributeError.__dict__["obj"]
_ARGS: Final = BaseException.__dict__["args"]
_STATE: Final = BaseException.__dict__["__dict__"]


class Parts(NamedTuple):
    """The parts of an exception, besides its notes, its frames and its causes; `fields` are those that its class does
    not make of its `args`.
    """

    args: Sequence[Any]
    state: Mapping[str, Any]
    fields: Mapping[str, Any]


class _Layout(NamedTuple):
    """The layout of an exception class.

    Attributes:
        maker: The class whose C code makes its instances.
        parameters: The fields that are given to the maker's constructor.
        fields: All fields by name; whether they are None unless set.
    """

    maker: type[BaseException]
    parameters: Sequence[str]
    fields: Mapping[str, tuple[_Field, bool]]

    def arguments(self, args: Sequence[Any], fields: Mapping[str, Any]) -> Sequence[Any]:
        found = [fields[name] for name in self.parameters if name in fields]
        return found if len(found) == len(self.parameters) else args[: len(self.parameters)]


def parts_of_error(error: BaseException) -> Parts:
    layout = _layout_of(type(error))
    fields: dict[str, Any] = {}
    for name, (field, may_lack) in layout.fields.items():
        try:
            value = field.__get__(error)
        except AttributeError:
            continue
        if value is not None or not may_lack:
            fields[name] = value
    parameters = layout.parameters
    if parameters and _is_made_of([fields.get(name) for name in parameters], error.args[: len(parameters)]):
        for name in parameters:
            del fields[name]
    return Parts(error.args, dict(error.__dict__), fields)


def is_made_of_parts(cls: type[BaseException]) -> bool:
    """Whether the parts of an exception are all of it: its class, or C code of another package, knows no better."""
    return isinstance(cls.__reduce__, MethodDescriptorType) and _is_builtin(_layout_of(cls).maker)


def bare_error(
    cls: type[BaseException], args: Sequence[Any], fields: Mapping[str, Any] = MappingProxyType({})
) -> BaseException:
    layout = _layout_of(cls)
    if layout.maker is BaseExceptionGroup:
        args = layout.arguments(args, fields)
    elif _is_builtin(layout.maker):
        args = ()
    error: BaseException = vars(layout.maker)["__new__"](cls, *args)
    return error


def fill_error(error: BaseException, parts: Parts) -> None:
    """Give a bare exception its parts. Fields that do not suit it are left out."""
    args, state, fields = parts
    layout = _layout_of(type(error))
    if layout.parameters and layout.maker is not BaseExceptionGroup:
        given = layout.arguments(args, fields)
        # Before Python 3.14, the text of one with a negative start is read from beyond its object.
        if len(given) == len(layout.parameters) and isinstance(given[-3], int) and given[-3] >= 0:
            with suppress(TypeError, ValueError, OverflowError):
                vars(layout.maker)["__init__"](error, *given)
    for name, value in fields.items():
        if name in layout.fields and name not in layout.parameters:
            with suppress(TypeError, AttributeError, ValueError, OverflowError):
                layout.fields[name][0].__set__(error, value)
    # By their descriptors: a class may refuse to have attributes set, as frozen dataclasses do.
    _ARGS.__set__(error, tuple(args))
    _STATE.__get__(error).update(state)


# By weak references: this must not keep classes alive.
_layouts: Final[dict[ref[type[BaseException]], _Layout]] = {}


def _layout_of(cls: type[BaseException]) -> _Layout:
    layout = _layouts.get(ref(cls))
    if layout is None:
        maker = _maker_of(cls)
        layout = _layouts[ref(cls, _layouts.pop)] = _Layout(maker, _PARAMETERS.get(maker, ()), dict(_fields(cls)))
    return layout


def _maker_of(cls: Any) -> type[BaseException]:
    while not isinstance(vars(cls).get("__new__"), BuiltinFunctionType):
        cls = cls.__base__
    maker: type[BaseException] = cls
    return maker


def _fields(cls: type) -> Iterator[tuple[str, tuple[_Field, bool]]]:
    for base in reversed(cls.__mro__):
        if base is not BaseException:
            for name, member in vars(base).items():
                inner = name.startswith("__") and name.endswith("__")
                if isinstance(member, _Field) and not inner and member is not _LEFT_OUT:
                    yield name, (member, _is_builtin(base))


def _is_made_of(fields: Sequence[Any], args: Sequence[Any]) -> bool:
    return fields == [tuple(arg) if type(arg) is list else arg for arg in args]


def _is_builtin(cls: type) -> bool:
    return cls.__module__ == "builtins"
