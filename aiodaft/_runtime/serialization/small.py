"""Small values: plain containers, dataclasses, enums, tensors and arrays that fit into a message.

Nothing of them is pickled, and nothing lies outside the payload. Other values take the way of the encoder: large ones,
and values that hold a ref, an object of another kind, a subclass of a container, or one container twice.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copyreg import dispatch_table
from dataclasses import is_dataclass
from enum import Enum
from operator import attrgetter
from types import FunctionType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from aiodaft._protocol.connections.codec import big_int, ext, packer, unpacker
from aiodaft._protocol.connections.messages import INLINE_LIMIT
from aiodaft._runtime.serialization.containers import FLAT
from aiodaft._runtime.serialization.definitions import Definition, Named, Thing, find, name_of, named
from aiodaft._runtime.serialization.pickling import importable
from aiodaft._runtime.serialization.tensors import loaded_torch
from aiodaft.actor import Actor

# The first byte of the payload; of one that has names of classes or functions.
SMALL: Final = 3
NAMED: Final = 8
# Extension codes; those of the encoder lie between.
TUPLE: Final = 2
RECORD: Final = 14
MEMBER: Final = 15
ARRAY: Final = 16
SMALL_TENSOR: Final = 17
NAMED_RECORD: Final = 18
DEFINED: Final = 19
# Elements of a container; and containers, tensors and arrays of a value.
_MOST: Final = 64
_DTYPES: Final = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
# Those, by the dtype; once torch is loaded.
_dtype_names: Final[dict[Any, str]] = {}
# Accelerators with tensors that torch takes for tensors of the host: fakes.
host_accelerators: Final[WeakSet[Any]] = WeakSet()


class _Survey:
    """Looks whether a value is small."""

    __slots__ = ("_room", "_seen", "defined")

    def __init__(self, defined: list[Named] | None) -> None:
        # Takes what is named; None if nothing may be.
        self.defined = defined
        self._room = INLINE_LIMIT
        self._seen: set[int] = set()

    def fits(self, value: Any) -> bool:
        kind = type(value)
        if kind in FLAT:
            return True
        if kind is list or kind is tuple:
            return self.container(value, value)
        if kind is dict:
            return FLAT.issuperset(map(type, value)) and self.container(value, value.values())
        if kind is bytes:
            return self.buffer(len(value))
        form = _form_of(kind)
        return form is not None and form.fits(self, value)

    def container(self, value: Any, parts: Collection[Any]) -> bool:
        """Whether something with parts is small."""
        seen = self._seen
        # On the path of many calls: like `is_new`.
        if len(parts) > _MOST or id(value) in seen or len(seen) == _MOST:
            return False
        seen.add(id(value))
        if not FLAT.issuperset(map(type, parts)):
            for part in parts:
                if not self.fits(part):
                    return False
        return True

    def is_new(self, key: int) -> bool:
        """Whether something is there for the first time, and not one too many."""
        if key in self._seen or len(self._seen) == _MOST:
            return False
        self._seen.add(key)
        return True

    def defines(self, thing: Thing) -> bool:
        """Whether a class or function that cannot be imported goes under its name."""
        found = None if self.defined is None else named(thing)
        if self.defined is None or found is None:
            return False
        self.defined.append(found)
        return True

    def buffer(self, nbytes: int) -> bool:
        """Whether so many bytes more fit into a message."""
        self._room -= nbytes
        return self._room >= 0


class _Form(NamedTuple):
    """How the values of a type travel."""

    code: int
    # Whether a value is small.
    fits: Callable[[_Survey, Any], bool]
    # The content of the extension, if it is.
    content: Callable[[Any], list[Any]]


class Small(NamedTuple):
    """A small value."""

    payload: bytes
    # What the receiver has to know before it gets the payload.
    defined: Sequence[Named]


def encode_small(value: Any, parts: Iterable[Any], *, by_name: bool) -> Small | None:
    """Encode a value if it, that is, these parts of it are small.

    `by_name`: The receiver is told what names stand for.
    """
    survey = _Survey([] if by_name else None)
    try:
        for part in parts:
            if not survey.fits(part):
                return None
        payload = (_NAMED_HEAD if survey.defined else _HEAD) + _packer().pack(value)
    except Exception:  # noqa: BLE001 - a tensor without memory, or code that changes the value meanwhile
        return None
    return Small(payload, survey.defined or ()) if len(payload) <= INLINE_LIMIT else None


def _as_ext(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return ext((TUPLE, _packer().pack(list(value))))
    form = _forms.get(kind)
    return big_int(value) if form is None else ext((form.code, _packer().pack(form.content(value))))


def _from_ext(code: int, content: bytes) -> Any:
    parts = unpack_small(content)
    return tuple(parts) if code == TUPLE else _MAKERS[code](*parts)


_HEAD: Final = bytes((SMALL,))
_NAMED_HEAD: Final = bytes((NAMED,))


def decode_named(payload: bytes, heard: Mapping[bytes, Definition]) -> Any:
    """Decode a payload that has names."""

    def from_ext(code: int, content: bytes) -> Any:
        parts = unpack(content)
        if code == TUPLE:
            return tuple(parts)
        if code == DEFINED:
            return find(parts[0], heard)
        if code == NAMED_RECORD:
            return _filled(find(parts[0], heard), parts[1])
        return _MAKERS[code](*parts)

    unpack = unpacker(from_ext)
    return unpack(memoryview(payload)[1:])


_packer: Final = packer(_as_ext)
# Decodes what follows the first byte of a payload.
unpack_small: Final = unpacker(_from_ext)


# Objects of classes that each process can import.


def _is_current(cls: Thing) -> bool:
    """Whether the name of a class or function still leads to it."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls or importable(cls)


def _record_fits(survey: _Survey, record: Any) -> bool:
    return _is_current(type(record)) and survey.container(record, record.__dict__.values())


def _member_fits(_: _Survey, member: Any) -> bool:
    cls = type(member)
    return cls._member_map_.get(member._name_) is member and _is_current(cls)


def _at(cls: type, content: Any) -> list[Any]:
    return [cls.__module__, cls.__qualname__, content]


def _find(module: str, name: str) -> Any:
    # As in pickle: it waits if another thread is importing the module.
    __import__(module)
    return attrgetter(name)(sys.modules[module])


def _make_record(module: str, name: str, state: dict[str, Any]) -> Any:
    return _filled(_find(module, name), state)


def _filled(cls: Any, state: dict[str, Any]) -> Any:
    record = object.__new__(cls)
    record.__dict__.update(state)
    return record


_RECORD: Final = _Form(RECORD, _record_fits, lambda record: _at(type(record), record.__dict__))
_MEMBER: Final = _Form(MEMBER, _member_fits, lambda member: _at(type(member), member._name_))


# Classes and functions that have names, and objects of such classes.


def _named_record_fits(survey: _Survey, record: Any) -> bool:
    return survey.defines(type(record)) and survey.container(record, record.__dict__.values())


def _definition_fits(survey: _Survey, thing: Any) -> bool:
    # A lambda, or a function in another, is usually made for one call.
    return not importable(thing) and (isinstance(thing, type) or _is_current(thing)) and survey.defines(thing)


_NAMED_RECORD: Final = _Form(NAMED_RECORD, _named_record_fits, lambda record: [name_of(type(record)), record.__dict__])
_DEFINITION: Final = _Form(DEFINED, _definition_fits, lambda thing: [name_of(thing)])


class _Plain:
    """Instances have a `__dict__`, and nothing else."""


def _is_record(cls: type) -> bool:
    """Whether the instances of a dataclass are their `__dict__`, as far as pickle is concerned."""
    own = ("__reduce_ex__", "__reduce__", "__getstate__", "__new__")
    hooks = ("__setstate__", "__getnewargs__", "__getnewargs_ex__")
    return (
        is_dataclass(cls)
        and not issubclass(cls, Actor)
        and cls.__basicsize__ == _Plain.__basicsize__
        and all(getattr(cls, name) is getattr(object, name) for name in own)
        and not any(hasattr(cls, name) for name in hooks)
        and not any(vars(base).get("__slots__") for base in cls.__mro__)
    )


# Tensors and arrays.


def _tensor_fits(survey: _Survey, tensor: Any) -> bool:
    return (
        tensor.is_cpu
        and not tensor.requires_grad
        and tensor.dtype in _dtype_names
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        # Not empty, and its memory was not freed.
        and tensor.data_ptr()
        and survey.buffer(tensor.nbytes)
        # Views of one storage stay views of one storage.
        and survey.is_new(tensor.untyped_storage().data_ptr())
        and all(kind.device_of(tensor) is None for kind in host_accelerators)
    )


def _tensor_content(tensor: Any) -> list[Any]:
    return [_dtype_names[tensor.dtype], list(tensor.shape), ctypes.string_at(tensor.data_ptr(), tensor.nbytes)]


def _make_tensor(dtype: str, shape: list[int], data: bytes) -> Any:
    import torch  # noqa: PLC0415 - optional package

    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    return tensor if len(shape) == 1 else tensor.view(shape)


def _array_fits(survey: _Survey, array: Any) -> bool:
    dtype = array.dtype
    return (
        # Writable, in C order.
        array.flags.carray
        # No structure, no other byte order.
        and dtype.isbuiltin == 1
        and not dtype.hasobject
        and array.nbytes > 0
        and survey.buffer(array.nbytes)
        and survey.is_new(id(array))
    )


def _make_array(dtype: str, shape: list[int], data: bytes) -> Any:
    return _find("numpy", "frombuffer")(bytearray(data), dtype).reshape(shape)


_TENSOR: Final = _Form(SMALL_TENSOR, _tensor_fits, _tensor_content)
_ARRAY: Final = _Form(ARRAY, _array_fits, lambda array: [array.dtype.str, list(array.shape), array.tobytes()])
_MAKERS: Final[dict[int, Callable[..., Any]]] = {
    RECORD: _make_record,
    MEMBER: lambda module, name, member: _find(module, name)[member],
    SMALL_TENSOR: _make_tensor,
    ARRAY: _make_array,
}
_forms: Final[WeakKeyDictionary[type, _Form | None]] = WeakKeyDictionary()


def _form_of(cls: type) -> _Form | None:
    try:
        return _forms[cls]
    except KeyError:
        form = _forms[cls] = _find_form(cls)
        return form


def _find_form(cls: type) -> _Form | None:
    torch = loaded_torch()
    if cls is getattr(torch, "Tensor", None):
        _dtype_names.update((getattr(torch, name), name) for name in _DTYPES)
        return _TENSOR
    if cls is getattr(sys.modules.get("numpy"), "ndarray", None):
        return _ARRAY
    if cls in (type, FunctionType):
        return _DEFINITION
    if cls in dispatch_table:
        return None
    if _is_record(cls):
        return _RECORD if importable(cls) else _NAMED_RECORD
    return _MEMBER if issubclass(cls, Enum) and cls.__reduce_ex__ is Enum.__reduce_ex__ and importable(cls) else None
