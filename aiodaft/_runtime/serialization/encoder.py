"""Python values to encoded values.

Plain data becomes MessagePack that keeps types (a tuple stays a tuple); tensors become spans of memory; other objects
are pickled (protocol 5, buffers out of band), by cloudpickle if pickle cannot. All of it is done at once, on the loop
if the loop's code can change the value; a large part is written in pieces, so that the receiver can decode it in a
helper thread that lets the loop run in between.

Others can change buffers that come over a connection. So a buffer that says which objects to build (a long skeleton or
pickle) has its digest in the payload, which comes in a message.
"""

from __future__ import annotations

import copyreg
import dataclasses
import inspect
import os
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from aiodaft._protocol.connections.codec import pack, pack_exts
from aiodaft._protocol.connections.messages import FEW_ARGS, INLINE_LIMIT, PLAIN_ARGS_LIMIT, PLAIN_TEXT_LIMIT
from aiodaft._runtime.process import refuses_pickle
from aiodaft._runtime.serialization import small as codes
from aiodaft._runtime.serialization.containers import (
    FLAT,
    builder_name,
    contains_ref,
    field_names,
    is_namedtuple,
    is_pure_dataclass,
    parts_of_error,
    reduced,
    text_size,
)
from aiodaft._runtime.serialization.encoded import (
    Encoded,
    Places,
    Source,
    TensorTable,
    blob_table,
    digest_of,
    is_dense_tensor,
    lay_out,
    whole_tensor,
)
from aiodaft._runtime.serialization.pickling import OfProcess, TooLong, pickle_into
from aiodaft._runtime.serialization.scripts import globals_used
from aiodaft._runtime.serialization.small import SmallEncoder, encode_small
from aiodaft.actor import Actor, Handle, target_of
from aiodaft.exceptions import SerializationError
from aiodaft.ref import Ref, parts_of

if TYPE_CHECKING:
    import torch


# The first byte of a payload that is not a small one.
PLAIN: Final = 0  # the skeleton
TABLE: Final = 1  # [offsets, specs of tensors, skeleton]
FAR: Final = 2  # [offsets, specs of tensors, digest], and the skeleton is the last buffer
HEAVY: Final = 4  # decoding takes long: not on a loop
SOLE: Final = 9  # the spec of the only tensor, in the only blob
_BUFFER_LIMIT: Final = 16 << 10
_LONG_COPY: Final = 1 << 20
_MAX_REFS: Final = 1 << 16
# More elements than this are not decoded on a loop; about 2 ms.
_BUDGET: Final = 50_000
CHUNK: Final = 10_000
# Containers with more objects than this are pickled as a whole: one pickle costs less than many.
_PICKLED_TOGETHER: Final = 16
_TRANSPARENT: Final = FLAT | {list, dict, tuple, set, frozenset, bytes, bytearray}


class Names(NamedTuple):
    """The names of a value in errors: ("Model.execute", [("args[0]", x)], "Model-1")."""

    whole: str
    parts: tuple[tuple[str, Any], ...] = ()
    to: str = ""


class Encoder(SmallEncoder):
    free = FLAT

    def __init__(self, places: Places, *, resolve: bool, limit: int | None) -> None:
        self.resolve = resolve
        self.limit = limit
        self.heavy = False
        self.sources: list[Source] = []
        self.slots: list[Any] = []
        self.refs: list[Any] = []
        self.tensors = TensorTable(places)
        self._home = places.home
        self._budget = _BUDGET

    def encode(self, value: Any) -> Encoded:
        skeleton = self._skeleton(value)
        if len(self.slots) + len(self.refs) > _MAX_REFS:
            raise ValueError(f"it holds more than {_MAX_REFS} refs; gather them into one with Refs.gather()")
        specs = self.tensors.finish(self.sources)
        far = len(skeleton) > INLINE_LIMIT // 2
        if far:
            _, skeleton = self.add_code(skeleton)
        if not self.sources and not specs:
            return Encoded(bytes((PLAIN | self.heavy * HEAVY,)) + skeleton, slots=self.slots, refs=self.refs)
        offsets, nbytes, device_nbytes = lay_out(self.sources)
        table = blob_table(self.sources, offsets, nbytes)
        body = pack([table, specs, skeleton])
        kind = (FAR if far else TABLE) | self.heavy * HEAVY
        return Encoded(bytes((kind,)) + body, self.sources, offsets, nbytes, device_nbytes, self.slots, self.refs)

    def _skeleton(self, value: Any) -> bytes:
        try:
            return pack(self.walk(value))
        except (RecursionError, ValueError):
            self.sources.clear()
            self.slots.clear()
            self.refs.clear()
        if refuses_pickle():
            raise ValueError("it is nested too deeply, or contains itself")
        # Deep or cyclic: pickle remembers the objects that it has seen. Its errors get no context.
        return pack(self._pickle(value))

    def add_source(self, buffer: Any) -> int:
        self.sources.append(Source.of(buffer))
        return len(self.sources) - 1

    def add_code(self, code: bytes | memoryview) -> tuple[int, bytes]:
        index = self.add_source(code)
        self.sources[index].frozen = True
        return index, digest_of(code)

    def add_bytes(self, value: bytes | bytearray) -> int:
        """The receiver copies it, because bytes own their memory."""
        self.heavy |= len(value) > _LONG_COPY
        index = self.add_source(value)
        self.sources[index].frozen = type(value) is bytes
        return index

    def add_tensor(self, tensor: Any) -> int:
        return self.tensors.add(tensor)

    def check_home(self, owned: OfProcess, what: object, instead: str) -> None:
        """Raises TypeError: a ref or handle belongs to another runtime than the process that encodes."""
        if self._home is not None and owned.process is not self._home:
            raise TypeError(f"{what!r} belongs to another runtime, that of {owned.process.runtime_name}: {instead}")

    def add_ref(self, ref: Any) -> int:
        self._check_ref(ref)
        self.refs.append(ref)
        return len(self.refs) - 1

    def _check_ref(self, ref: Ref[Any]) -> None:
        self.check_home(cast("OfProcess", ref._state), ref, "await it, and pass its value")

    def _spend(self, elements: int) -> None:
        self._budget -= elements
        if self._budget < 0:
            if self.limit is not None:
                raise TooLong
            self.heavy = True

    def sequence(self, value: Any) -> Any:
        self._spend(len(value))
        if len(value) > CHUNK:
            return self._chunks("l", list(value))
        if FLAT.issuperset(map(type, value)):
            return value if type(value) is list else list(value)
        if len(value) > 1 and _is_built(type(next(iter(value)))) and (alike := self._alike(value)) is not None:
            return alike
        if len(value) > _PICKLED_TOGETHER and self._is_opaque(value):
            return self._pickle(value)
        return [self.walk(item) for item in value]

    def _alike(self, values: Collection[Any]) -> Any:
        """Handles, or others that one function builds, by columns of its arguments: the same ones travel once."""
        if len(set(map(type, values))) > 1:
            return None
        made = [self._parts_of(value) for value in values]
        functions, arguments = zip(*((function, args) for function, args, *_ in made), strict=True)
        name = builder_name(functions[0])
        if name is None or functions.count(functions[0]) < len(functions):
            return None
        self.resolve, outer = False, self.resolve
        try:
            columns = [self.walk(_without_repeats(column)) for column in zip(*arguments, strict=True)]
            return pack_exts(codes.ALIKE, [name, len(values), columns])
        finally:
            self.resolve = outer

    def mapping(self, value: dict[Any, Any]) -> Any:
        self._spend(len(value))
        if len(value) > CHUNK:
            return self._chunks("d", [part for item in value.items() for part in item])
        if FLAT.issuperset(map(type, value)) and FLAT.issuperset(map(type, value.values())):
            return value
        if len(value) > _PICKLED_TOGETHER and self._is_opaque(value.values()):
            return self._pickle(value)
        return {self.walk(key): self.walk(item) for key, item in value.items()}

    def _is_opaque(self, items: Collection[Any]) -> bool:
        opaque = {cls for cls in set(map(type, items)) - _TRANSPARENT if not _is_value_of_runtime(cls)}
        return (
            bool(opaque)
            and not refuses_pickle()
            and not all(map(is_dense_tensor, items))
            and not (self.resolve and any(map(contains_ref, items)))
        )

    def _chunks(self, kind: str, items: list[Any]) -> Any:
        """Encode a long container in pieces, in a separate buffer: unpacking it at once would hold the interpreter."""
        self.heavy = True
        out = bytearray()
        for start in range(0, len(items), CHUNK):
            part = items[start : start + CHUNK]
            out += pack(self.sequence(part))
        return pack_exts(codes.CHUNKS, [kind, *self.add_code(memoryview(out))])

    def text(self, value: Any) -> Any:
        if len(value) <= _BUFFER_LIMIT:
            return value
        return pack_exts(codes.BUFFER, [self.add_bytes(value), False])

    def bytearray(self, value: bytearray) -> Any:
        if len(value) <= _BUFFER_LIMIT:
            return pack_exts(codes.BYTEARRAY, bytes(value))
        return pack_exts(codes.BUFFER, [self.add_bytes(value), True])

    def other(self, value: Any) -> Any:
        if is_dense_tensor(value):
            return pack_exts(codes.TENSOR, self.tensors.add(value))
        if isinstance(value, Ref):
            return self._walk_ref(value)
        if self.resolve and contains_ref(value):
            record = self._record(value)
            return self._rebuilt(value) if record is None else record
        # A node takes no pickle, with any codec of the runtime.
        return self._build(value) if refuses_pickle() or _is_value_of_runtime(type(value)) else self._pickle(value)

    def _record(self, value: Any) -> Any:
        cls = type(value)
        if is_namedtuple(cls):
            return pack_exts(codes.NAMEDTUPLE, [self.thing(cls), [self.walk(item) for item in value]])
        if is_pure_dataclass(cls) and not issubclass(cls, Actor):
            fields = {name: self.walk(getattr(value, name)) for name in field_names(value)}
            return pack_exts(codes.DATACLASS, [self.thing(cls), fields])
        return None

    def _rebuilt(self, value: Any) -> Any:
        return (
            self._pickle(value) if refuses_pickle() else pack_exts(codes.REBUILT, list(map(self.walk, reduced(value))))
        )

    def _build(self, value: Any) -> Any:
        cls: type[Any] = type(value)
        if (record := self._record(value)) is not None:
            return record
        if issubclass(cls, BaseException):
            # Its frames stay here.
            args, state, fields = parts_of_error(value)
            parts = [list(args), state, value.__cause__, fields]
            return pack_exts(codes.EXCEPTION, [self.thing(cls), *map(self.walk, parts)])
        if cls.__module__ == "numpy" and cls.__name__ == "ndarray" and _is_simple(value.dtype):
            order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            content = value.ravel(order)
            index = self.add_source(content.view("u1")) if content.size else -1
            return pack_exts(codes.LARGE_ARRAY, [value.dtype.str, index, list(value.shape), order])
        if not cls.__module__.startswith("aiodaft.") or issubclass(cls, Actor):
            return self._pickle(value)
        function, args, *_ = self._parts_of(value)
        name = builder_name(function)
        if name is None:
            return self._pickle(value)
        self.resolve, outer = False, self.resolve
        try:
            return pack_exts(codes.BUILT, [name, [self.walk(part) for part in args]])
        finally:
            self.resolve = outer

    tensor = array = record = other

    def _parts_of(self, value: Any) -> tuple[Any, ...]:
        if type(value) is Handle:
            self.check_home(cast("OfProcess", target_of(value)), value, "pass a handle of this one, or a value")
        return cast("tuple[Any, ...]", value.__reduce_ex__(5))

    def _walk_ref(self, ref: Ref[Any]) -> Any:
        if self.resolve and (parts := parts_of(ref)) is not None:
            return [self.walk(part) for part in parts]
        if not self.resolve:
            return pack_exts(codes.REF, self.add_ref(ref))
        self._check_ref(ref)
        self.slots.append(ref)
        return pack_exts(codes.SLOT, len(self.slots) - 1)

    def _pickle(self, value: Any) -> Any:
        first = len(self.sources)
        data = pickle_into(self, value)
        count = len(self.sources) - first
        if len(data) <= _BUFFER_LIMIT:
            return pack_exts(codes.PICKLE, [data, b"", first, count])
        if len(data) > INLINE_LIMIT:
            self.heavy = True
        return pack_exts(codes.PICKLE, [*self.add_code(data), first, count])


def encode(
    value: Any,
    *,
    names: Names,
    places: Places = Places(),  # noqa: B008 - it does not change
    resolve: bool = False,
    limit: int | None = None,
    small: bool = True,
) -> Encoded:
    """Encode a value.

    Args:
        resolve: Whether refs in containers and records stand for their values.
        limit: Bytes of a pickle, or 50,000 elements, are too long; None: nothing is.
        small: Whether it may be small; False if `encode_small` was tried.

    Raises:
        SerializationError: A part of it cannot travel; the message has the path to the part.
        TooLong: It is beyond `limit`.
    """
    found = encode_small((value,), by_name=False) if small else None
    if found is not None:
        return Encoded(found[0])

    def attempt(part: Any) -> Encoded:
        if is_dense_tensor(part):
            return _encode_tensor(part, places)
        return Encoder(places, resolve=resolve, limit=limit).encode(part)

    try:
        return attempt(value)
    except (TooLong, SerializationError):
        raise
    except Exception as error:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        failed = error
    # Outside of the except block, so that the error has no context with frames of pickle.
    to = f" to {names.to}" if names.to else ""
    path, reason = find_path(names.parts, attempt)
    refused = f"{path} of {names.whole} cannot travel{to}: {reason or failed}{advice_on(failed)}"
    raise SerializationError(refused) from cause_of(failed)


def _is_value_of_runtime(cls: type) -> bool:
    """Whether a class is the runtime's own. Its exceptions are pickled, for their frames."""
    return cls.__module__.startswith("aiodaft.") and not issubclass(cls, BaseException)


def _is_built(cls: type) -> bool:
    return cls.__module__.startswith("aiodaft.") and "__reduce__" in vars(cls) and not issubclass(cls, Ref)


def _without_repeats(column: tuple[Any, ...]) -> list[Any]:
    first, kind = column[0], type(column[0])
    same = column.count(first) == len(column) and all(type(item) is kind for item in column)
    return [first] if same else list(column)


def _is_simple(dtype: Any) -> bool:
    return not dtype.hasobject and dtype.names is None


def _encode_tensor(tensor: torch.Tensor, places: Places) -> Encoded:
    sources: list[Source] = []
    found = whole_tensor(tensor, places)
    if found is not None:
        source, spec = found
        sources.append(source)
    else:
        table = TensorTable(places)
        table.add(tensor)
        (spec,) = table.finish(sources)
    offsets, nbytes, device_nbytes = lay_out(sources)
    return Encoded(bytes((SOLE,)) + pack(spec), sources, offsets, nbytes, device_nbytes)


def is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 64)
    if kind is str or kind is bytes:
        return len(value) <= PLAIN_TEXT_LIMIT
    return kind in FLAT


def plain_payload(value: Any) -> bytes:
    return bytes((PLAIN,)) + pack(value)


def all_plain(values: Sequence[Any]) -> bool:
    if len(values) > FEW_ARGS and not are_short(values):
        return False
    for value in values:  # noqa: SIM110 - on the path of every call: all() with a generator costs twice as much
        if not is_plain(value):
            return False
    return True


def are_plain_with_tuples(values: Sequence[Any]) -> bool:
    """The same of arguments that are plain, or tuples of plain values: frames have tuples."""
    return len(values) <= FEW_ARGS and all(is_plain(value) or _is_plain_tuple(value) for value in values)


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and len(value) <= FEW_ARGS and all_plain(value) and text_size(value) <= PLAIN_TEXT_LIMIT


def are_short(values: Sequence[Any]) -> bool:
    """Whether plain arguments are together so short that a window of calls has room for them."""
    if len(values) <= FEW_ARGS:
        return True
    if len(values) > PLAIN_ARGS_LIMIT:
        return False
    return text_size(values) <= FEW_ARGS * PLAIN_TEXT_LIMIT


_INSIDE: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep, pickle.__file__, copyreg.__file__
_MAX_DEPTH: Final = 20
_MAX_CHILDREN: Final = 1000


def find_path(names: Iterable[tuple[str, Any]], attempt: Callable[[Any], object]) -> tuple[str, str]:
    """The path to the deepest part of some values that cannot be encoded, and why it cannot."""
    path, reason = "the value", ""
    parts: Iterable[tuple[str, Any]] = names
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        failing = next(
            ((name, value, why) for name, value in islice(parts, _MAX_CHILDREN) if (why := _why(value, attempt))), None
        )
        # An object that refers to itself has no deepest part.
        if failing is None or id(failing[1]) in seen:
            break
        path, value, reason = failing
        seen.add(id(value))
        parts = _children(value, path)
    return path, reason


def advice_on(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "; it is nested too deeply: make it flatter, or make it in the actor"
    if not _refuses(error):
        return ""
    if str(error).endswith(" 'generator' object"):
        return "; to give its values one by one, `yield` them in the method itself, which is a stream then"
    if str(error).endswith(" 'coroutine' object"):
        return "; `await` it, and pass what it gives"
    return "; make it in the actor, or leave it out of its object's state (`__getstate__`)"


def cause_of(error: BaseException) -> BaseException | None:
    """The error, with frames of the user's code alone, if that raised it or the value is nested too deeply."""
    if isinstance(error, RecursionError):
        return error.with_traceback(None)
    frames = None if _refuses(error) else error.__traceback__
    while frames is not None and _is_inside(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return None if frames is None else error.with_traceback(frames)


def _refuses(error: BaseException) -> bool:
    return str(error).startswith(("cannot pickle", "Can't pickle", "no default __reduce__"))


def _is_inside(filename: str) -> bool:
    return filename.startswith(_INSIDE) or f"{os.sep}cloudpickle{os.sep}" in filename


def _why(value: Any, attempt: Callable[[Any], object]) -> str:
    try:
        attempt(value)
    except Exception as error:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        return f"{str(error) or type(error).__name__} ({type(value).__module__}.{type(value).__qualname__})"
    return ""


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}[{key!r:.40}]", item
            yield f"{path}[key {key!r:.40}]", key
    elif isinstance(value, list | tuple | set | frozenset):
        fields = getattr(value, "_fields", None)
        yield from (((f"{path}.{fields[i]}" if fields else f"{path}[{i}]"), item) for i, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f"{path}.{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, type):
        own = {name: item for name, item in vars(value).items() if not name.startswith("__")}
        yield from ((f"{path}.{name}", getattr(item, "__wrapped__", item)) for name, item in own.items())
    elif isinstance(value, FunctionType):
        there, name = value.__globals__, value.__qualname__
        used = [each for each in globals_used(value.__code__) if each in there]
        yield from ((f"the global {each} that {name} uses, in {path}", there[each]) for each in used)
        variables = inspect.getclosurevars(value).nonlocals
        yield from ((f"the variable {each} of {name}, in {path}", item) for each, item in variables.items())
    elif not _has_own_reduce(value):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f"{path}.{name}", item) for name, item in attributes.items())


def _has_own_reduce(value: Any) -> bool:
    # Such an object is not pickled by its attributes.
    return isinstance(type(value).__reduce__, FunctionType)
