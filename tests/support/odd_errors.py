"""Exceptions of every builtin class and of odd classes, and their texts for users."""

from __future__ import annotations

import builtins
import json
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import Any, Final

# The usual arguments of builtin classes that take more than a text.
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "UnicodeDecodeError": ("utf-8", b"ab\xff", 2, 3, "invalid start byte"),
    "UnicodeEncodeError": ("ascii", "ab\xff", 2, 3, "ordinal not in range"),
    "UnicodeTranslateError": ("ab\xff", 2, 3, "no such character"),
    "SyntaxError": ("invalid syntax", ("rules.py", 1, 5, "x = = 1", 1, 6)),
    "OSError": (2, "No such file", "a.txt", None, "b.txt"),
    "BlockingIOError": (11, "would block", 5),
    "BaseExceptionGroup": ("several", [ValueError(1), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")]),
}
_ATTRIBUTES: Final = (
    "name", "path", "name_from", "value", "code", "msg", "filename", "filename2", "errno", "strerror",
    "characters_written", "lineno", "offset", "text", "end_lineno", "end_offset", "print_file_and_line", "encoding",
    "object", "start", "end", "reason", "message", "first", "second", "doc", "pos", "position",
)  # fmt: skip


class KeywordsError(UnicodeDecodeError):
    """Cannot be made of its arguments."""

    def __new__(cls, *, first: int) -> KeywordsError:
        return super().__new__(cls, "utf-8", b"\xff", 0, 1, "bad")

    def __init__(self, *, first: int) -> None:
        super().__init__("utf-8", b"\xff", 0, 1, "bad")
        self.first = first


class SlotsError(ValueError, OSError):
    __slots__ = ("_own", "first", "second")

    def __init__(self, *, first: Any) -> None:
        OSError.__init__(self, 13, "Permission denied", "f.txt")
        self.first = first


class ReducedError(ImportError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} of {second}", name="a_module")
        self.first = first
        self.second = second

    def __reduce__(self) -> Any:
        return ReducedError, (self.first, self.second), {"name": self.name}


class BareError(SyntaxError):
    def __init__(self, first: int) -> None:
        """Does not call that of its base."""
        self.first = first


@dataclass(frozen=True)
class FrozenError(Exception):
    first: int
    second: str


class OwnGroup(ExceptionGroup[Exception]):
    def __new__(cls, first: list[Exception]) -> OwnGroup:
        return super().__new__(cls, "own", first)

    def __init__(self, first: list[Exception]) -> None:
        self.first = len(first)


class NoTextError(Exception):
    def __str__(self) -> str:
        return f"{self.__dict__['first']} is all"


def _of(cls: type[BaseException], *args: Any, **attributes: Any) -> BaseException:
    error = cls(*args)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def _usual(cls: type[BaseException]) -> BaseException:
    for base in cls.__mro__:
        if base.__name__ in _ARGUMENTS:
            return cls(*_ARGUMENTS[base.__name__])
    return _of(cls, "a text", **{"name": "a_name"} if hasattr(cls, "name") else {})


def _raised(function: Any, *args: Any) -> BaseException:
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - any
        return error
    raise AssertionError


BUILTIN: Final = [
    _usual(cls)
    for name, cls in vars(builtins).items()
    if isinstance(cls, type) and issubclass(cls, BaseException) and cls.__name__ == name
]
ODD: Final = [
    OSError("a text alone"), KeyError("key", 1), SystemExit(), StopIteration(), ValueError(),
    KeywordsError(first=1), SlotsError(first=None), BareError(3), FrozenError(1, "two"), NoTextError(),
    OwnGroup([ValueError(1), OwnGroup([KeyError(2)])]), ExceptionGroup("deep", [OwnGroup([OSError(2, "x", "y")])]),
    _of(NoTextError, first=3), _of(ValueError, "changed", args=(1, 2)),
    _raised(json.loads, "{"), _raised(ET.fromstring, "<a><b></a>"),
]  # fmt: skip


def facts_of(error: BaseException) -> list[Any]:
    """The class of an exception, its text, its arguments and all that it has by a name."""
    try:
        text = str(error)
    except KeyError:
        text = "<none>"
    found = {name: repr(getattr(error, name)) for name in (*_ATTRIBUTES, *vars(error)) if hasattr(error, name)}
    inside = [facts_of(one) for one in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return [type(error), text, repr(error.args), found, inside]
