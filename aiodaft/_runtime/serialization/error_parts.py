"""The parts of an exception, and an exception made of them without code of its class.

Besides `args` and `__dict__`, an exception has fields: the values that the C code of its class keeps, such as
`OSError.filename`, and the `__slots__` of its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
)
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import ref

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
