"""Values without pickle, for `Runtime(codec="msgpack")`: the objects that a received value may build, and no others.

Dataclasses, named tuples, exceptions and members of enums of classes that the receiver can import are built from their
parts, without a method of theirs. Objects of the runtime itself, such as handles, are built by functions that are
marked here by `builder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Final, TypeVar

from aiodaft._runtime.serialization.containers import is_namedtuple, rebuild_dataclass
from aiodaft._runtime.serialization.error_parts import Parts, bare_error, fill_error

BuilderT = TypeVar("BuilderT", bound=Callable[..., Any])

# Public modules with functions that are marked; a process that has not used them loads them when such a value comes.
_MODULES: Final = ("aiodaft.channel", "aiodaft.group", "aiodaft.service")
_builders: Final[dict[str, Callable[..., Any]]] = {}
# The kinds that a class may have which a received value names.
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
    """The name of a marked function; None for any other object."""
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    return name if _builders.get(name) is function else None


def builder_named(name: str) -> Callable[..., Any]:
    module = name.partition(":")[0]
    if module in _MODULES:
        import_module(module)
    return _builders[name]


def checked(cls: Any, kind: str) -> Any:
    """A class that a received value names, if it is of the kind that the value says it is."""
    if not (isinstance(cls, type) and _ALLOWED[kind](cls)):
        raise TypeError(f"{cls!r:.100} is no {kind}")
    return cls


def build_error(
    cls: Any, args: list[Any], state: dict[str, Any], cause: BaseException | None, fields: Mapping[str, Any]
) -> BaseException:
    """An exception from its parts, without a method of its class."""
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
