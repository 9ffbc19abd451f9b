"""Small values: plain containers, dataclasses, enums, classes, tensors and arrays that fit into a message.

Each kind of part has a method of `SmallEncoder`. Nothing is pickled, and nothing lies outside the payload. Other values
take the way of `encoder`, which has more for some kinds: large values, and values that hold a ref, an object of another
kind, a subclass of a container, or one container twice.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from copyreg import dispatch_table
from dataclasses import is_dataclass
from enum import Enum
from operator import attrgetter
from types import FunctionType
from typing import Any, Final, TypeAlias
from weakref import ref

from aiodaft._protocol.connections.codec import ext, pack, pack_exts
from aiodaft._protocol.connections.messages import INLINE_LIMIT
from aiodaft._runtime.process import refuses_pickle
from aiodaft._runtime.serialization.containers import FLAT, text_size
from aiodaft._runtime.serialization.definitions import Named, Thing, named
from aiodaft._runtime.serialization.encoded import loaded_torch
from aiodaft._runtime.serialization.scripts import importable
from aiodaft.actor import Actor

Small: TypeAlias = tuple[bytes, Sequence[Named]]

# The first byte of the payload; of one that has names of classes or functions.
SMALL: Final = 3
NAMED: Final = 8
_SMALL_HEAD: Final = bytes((SMALL,))
_NAMED_HEAD: Final = bytes((NAMED,))
# Extension codes; 1 is the codec's own for big integers.
(
    TUPLE, SET, FROZENSET, BYTEARRAY, BUFFER, TENSOR, SLOT, REF, PICKLE, DATACLASS, NAMEDTUPLE, CHUNKS,
    RECORD, MEMBER, ARRAY, SMALL_TENSOR, THING, BUILT, EXCEPTION, LARGE_ARRAY, ALIKE,
    REBUILT,
) = range(2, 24)  # fmt: skip
_MOST: Final = 64
# Extensions in each other: the stack of a decoding thread has 40 KB for each.
_DEEPEST: Final = 100
_STR: Final = frozenset({str})
_NUMBERS: Final = FLAT - {str}
_PLAIN: Final = FLAT | {bytes}
_SEQUENCES: Final[Mapping[type, int]] = {tuple: TUPLE, set: SET, frozenset: FROZENSET}
DTYPES: Final = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_dtype_codes: Final[dict[Any, bytes]] = {}
SIZE_BYTES: Final = 8
_VECTOR: Final = b"\1"
# Accelerators with tensors that torch takes for tensors of the host: fakes.
host_accelerators: Final[set[ref[Any]]] = set()
_bytes_at: Final[Callable[[int, int], bytes]] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)((
    "PyBytes_FromStringAndSize",
    ctypes.pythonapi,
))


class NotSmall(Exception): ...


class SmallEncoder:
    free = _NUMBERS

    defined: list[Named] | None = None
    _room = INLINE_LIMIT
    _depth = 0
    _seen: set[int] | None = None

    def walk(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            return self.sequence(value)
        if kind is dict:
            return self.mapping(value)
        if kind in self.free:
            return value
        code = _SEQUENCES.get(kind)
        if code is not None:
            self._descend()
            packed = pack_exts(code, self.sequence(value))
            self._depth -= 1
            return packed
        return getattr(self, _METHODS.get(kind) or _found.get(ref(kind)) or _find_method(kind))(value)

    def _descend(self) -> None:
        """Account for an extension in an extension. A value that is too deep is left to pickle."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise RecursionError("there are too many extensions in each other")

    def _enter(self, value: Any, parts: Collection[Any]) -> bool:
        """Returns whether the parts are plain."""
        # On the path of many calls: like `_take`.
        seen = self._seen
        if seen is None:
            seen = self._seen = set()
        if len(parts) > _MOST or id(value) in seen or len(seen) == _MOST or self._room < 0:
            raise NotSmall
        seen.add(id(value))
        kinds = set(map(type, parts))
        if not kinds <= _NUMBERS:
            if not kinds <= _PLAIN:
                return False
            self._room -= text_size(parts)
            if self._room < 0:
                raise NotSmall
        return True

    def _take(self, key: int, nbytes: int) -> None:
        """Account for a part that may be there once."""
        self._room -= nbytes
        seen = self._seen = self._seen or set()
        if self._room < 0 or key in seen or len(seen) == _MOST:
            raise NotSmall
        seen.add(key)

    def sequence(self, value: Any) -> Any:
        if self._enter(value, value):
            return value if type(value) is list else list(value)
        return [part if type(part) in _NUMBERS else self.walk(part) for part in value]

    def mapping(self, value: dict[Any, Any]) -> Any:
        if _STR.issuperset(map(type, value)):
            self._room -= sum(map(len, value))
        elif FLAT.issuperset(map(type, value)):
            self._room -= sum(len(key) for key in value if type(key) is str)
        else:
            raise NotSmall
        return value if self._enter(value, value.values()) else self._walk_values(value)

    def _walk_values(self, value: dict[Any, Any]) -> dict[Any, Any]:
        return {key: part if type(part) in _NUMBERS else self.walk(part) for key, part in value.items()}

    def text(self, value: Any) -> Any:
        if len(value) > self._room:
            raise NotSmall
        self._room -= len(value)
        return value

    def record(self, value: Any) -> Any:
        cls, state = type(value), value.__dict__
        where = self.where(cls) if _hooks_of(cls) == _NO_HOOKS else None
        if where is None:
            return self.other(value)
        self._descend()
        if not self._enter(value, state.values()):
            state = self._walk_values(state)
        self._depth -= 1
        return pack_exts(RECORD, [where, state])

    def member(self, value: Any) -> Any:
        cls = type(value)
        where = self.where(cls) if cls._member_map_.get(value._name_) is value else None
        return self.other(value) if where is None else pack_exts(MEMBER, [where, value._name_])

    def thing(self, value: Any) -> Any:
        where = self.where(value)
        return self.other(value) if where is None else pack_exts(THING, where)

    def tensor(self, value: Any) -> Any:
        if not _dtype_codes:
            torch = sys.modules["torch"]
            _dtype_codes.update((getattr(torch, name), bytes((code,))) for code, name in enumerate(DTYPES))
        dtype = _dtype_codes.get(value.dtype)
        address = value.data_ptr()
        if (
            (nbytes := value.nbytes) > self._room
            or dtype is None
            # Not empty, and its memory was not freed.
            or not address
            or not value.is_cpu
            or value.requires_grad
            or value.is_nested
            or not value.is_contiguous()
            or value.is_neg()
            or (host_accelerators and _is_on_accelerator(value))
        ):
            raise NotSmall
        # Views of one storage stay views of one storage.
        self._take(address - value.storage_offset() * value.element_size(), nbytes)
        # Its dtype, the number of its dimensions, their sizes if they are not one, and its memory.
        shape = _VECTOR if value.dim() == 1 else _shape_of(value)
        return ext((SMALL_TENSOR, dtype + shape + _bytes_at(address, nbytes)))

    def array(self, value: Any) -> Any:
        dtype = value.dtype
        # Writable, in C order; no structure, no other byte order.
        if not (value.flags.carray and dtype.isbuiltin == 1 and not dtype.hasobject and value.nbytes > 0):
            raise NotSmall
        self._take(id(value), value.nbytes)
        shape = () if value.ndim == 1 else (list(value.shape),)
        return pack_exts(ARRAY, [dtype.str, value.tobytes(), *shape])

    def other(self, value: Any) -> Any:
        raise NotSmall

    bytearray = other

    def where(self, thing: Thing) -> str | bytes | None:
        """The place where the receiver finds a class or function: its module and name, or a name that it was told."""
        place = _places.get(ref(thing))
        if place is not None and getattr(sys.modules.get(place[0]), place[1], None) is thing:
            return place[2]
        if importable(thing):
            module, name = thing.__module__, thing.__qualname__
            place = _places[ref(thing, _places.pop)] = module, name, f"{module}:{name}"
            return place[2]
        # A lambda, or a function in another, is usually made for one call.
        if self.defined is None or refuses_pickle() or (type(thing) is FunctionType and not _is_global(thing)):
            return None
        known = named(thing)
        if known is None:
            return None
        self.defined.append(known)
        return known.name


def encode_small(parts: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, by_name: bool) -> Small | None:
    defined: Sequence[Named] = ()
    try:
        flat = _flat_parts(parts, kwargs)
        if flat is not None:
            # On the path of many calls: there is nothing to be found in it.
            payload = _SMALL_HEAD + pack(flat)
        else:
            payload, defined = _walked(parts, kwargs, by_name=by_name)
    except Exception:  # noqa: BLE001 - a tensor without memory, or code that changes the value meanwhile
        return None
    return (payload, defined) if len(payload) <= INLINE_LIMIT else None


def _walked(parts: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, by_name: bool) -> Small:
    encoder = SmallEncoder()
    if by_name:
        encoder.defined = []
    walked: Any = []
    # No comprehension, which would be one more function for each call.
    for part in parts:
        walked.append(part if type(part) in _NUMBERS else encoder.walk(part))
    if kwargs is None:
        (walked,) = walked
    else:
        walked = [walked, {name: encoder.walk(arg) for name, arg in kwargs.items()} if kwargs else kwargs]
    defined = encoder.defined or ()
    return (_NAMED_HEAD if defined else _SMALL_HEAD) + pack(walked), defined


def _flat_parts(parts: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    if kwargs is None:
        return _flat(parts[0])
    if len(parts) == 1 and not kwargs:
        flat = _flat(parts[0])
        return None if flat is None else [[flat], kwargs]
    return None if parts or _flat(kwargs) is None else [[], kwargs]


def _flat(value: Any) -> Any:
    kind = type(value)
    parts: Collection[Any]
    if kind is dict:
        if not _STR.issuperset(map(type, value)) or sum(map(len, value)) > INLINE_LIMIT:
            return None
        parts = value.values()
    elif kind is list or kind is tuple:
        parts = value
    else:
        return None
    if len(parts) > _MOST:
        return None
    if not _NUMBERS.issuperset(map(type, parts)) and (
        not _PLAIN.issuperset(map(type, parts)) or text_size(parts) > INLINE_LIMIT
    ):
        return None
    return pack_exts(TUPLE, list(value)) if kind is tuple else value


def _shape_of(tensor: Any) -> bytes:
    return bytes((tensor.dim(),)) + b"".join(size.to_bytes(SIZE_BYTES, "little") for size in tensor.shape)


def _is_on_accelerator(tensor: Any) -> bool:
    return any(kind.device_of(tensor) is not None for found in list(host_accelerators) if (kind := found()) is not None)


def _is_global(function: FunctionType) -> bool:
    return getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function


_METHODS: Final[Mapping[type, str]] = {
    str: "text", bytes: "text", bytearray: "bytearray", type: "thing", FunctionType: "thing"
}  # fmt: skip
_found: Final[dict[ref[type], str]] = {}
_places: Final[dict[ref[Any], tuple[str, str, str]]] = {}


def _find_method(cls: type) -> str:
    name = _found[ref(cls, _found.pop)] = _name_method(cls)
    return name


def _name_method(cls: type) -> str:
    if cls in dispatch_table:
        return "other"
    if cls is getattr(loaded_torch(), "Tensor", None):
        return "tensor"
    if cls is getattr(sys.modules.get("numpy"), "ndarray", None):
        return "array"
    if issubclass(cls, type):
        return "thing"
    if issubclass(cls, Enum) and cls.__reduce_ex__ is Enum.__reduce_ex__:
        return "member"
    return "record" if _is_record(cls) else "other"


class _Plain:
    pass


# A class may get its own at any time.
_hooks_of: Final = attrgetter("__reduce_ex__", "__reduce__", "__getstate__", "__new__")
_NO_HOOKS: Final = _hooks_of(object)


def _is_record(cls: type) -> bool:
    return (
        is_dataclass(cls)
        and not issubclass(cls, Actor)
        and cls.__basicsize__ == _Plain.__basicsize__
        and _hooks_of(cls) == _NO_HOOKS
        and not any(hasattr(cls, name) for name in ("__setstate__", "__getnewargs__", "__getnewargs_ex__"))
        and not any(vars(base).get("__slots__") for base in cls.__mro__)
    )
