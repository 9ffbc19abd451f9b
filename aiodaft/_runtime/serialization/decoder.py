"""Encoded values to Python values. Buffers are not copied: tensors and arrays use the memory of the blobs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from aiodaft._protocol.connections.codec import BIG_INT, big_int_of, unpack_stream, unpacker
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization import encoder as wire
from aiodaft._runtime.serialization import small as codes
from aiodaft._runtime.serialization.containers import (
    build_dataclass,
    build_error,
    build_member,
    build_namedtuple,
    builder_named,
    checked,
    rebuild,
)
from aiodaft._runtime.serialization.definitions import NONE_HEARD, Definition, find
from aiodaft._runtime.serialization.encoded import Spec, TensorMaker, as_bytes, digest_of, tensor_in
from aiodaft._runtime.serialization.pickling import check_pickle, decoding_in, unpickle, yield_gil
from aiodaft._runtime.serialization.small import NAMED, SIZE_BYTES, SMALL
from aiodaft.exceptions import SerializationError
from aiodaft.ref import Ref
from aiodaft_transport.memory import address_of, copy_memory

_new_bytes: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
_new_bytearray: Final = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype = ctypes.py_object
_new_bytearray.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]


def is_heavy(payload: bytes) -> bool:
    return bool(payload[0] & wire.HEAVY)


def is_tensor(payload: bytes) -> bool:
    return payload[0] == wire.SOLE


def spec_of(payload: bytes) -> Spec:
    spec: Spec = _SMALL_DECODER.unpack(memoryview(payload)[1:])
    return spec


class Decoder:
    home: Process | None = None
    blobs: Sequence[memoryview] = ()
    slots: Sequence[Any] = ()
    refs: Sequence[Any] = ()
    pause: Callable[[], None] | None = None
    tensors: TensorMaker | None = None
    _table: Sequence[Sequence[int]] = ()

    def __init__(self, heard: Mapping[bytes, Definition] = NONE_HEARD) -> None:
        self._heard = heard
        self.unpack: Callable[[bytes | memoryview], Any] = unpacker(self._extension)

    def close(self) -> None:
        self.tensors = None
        del self.unpack

    def decode(self, payload: bytes, origin: Callable[[int], Any]) -> Any:
        body = memoryview(payload)[1:]
        if payload[0] & ~wire.HEAVY in _WHOLE:
            return self.unpack(body)
        self._table, specs, skeleton = self.unpack(body)
        self.tensors = TensorMaker(specs, self.buffer, origin)
        return self.unpack(self.code(-1, skeleton) if payload[0] & ~wire.HEAVY == wire.FAR else skeleton)

    def buffer(self, index: int) -> memoryview:
        blob, offset, nbytes = self._table[index]
        return self.blobs[blob][offset : offset + nbytes] if nbytes else memoryview(b"")

    def code(self, index: int, digest: bytes) -> memoryview:
        found = self.buffer(index)
        if digest_of(found) != digest:
            raise ValueError("it was changed on its way")
        return found

    def tensor(self, index: int) -> Any:
        assert self.tensors is not None
        return self.tensors.make(index)

    def ref(self, index: int) -> Any:
        return self.refs[index]

    def thing(self, where: str | bytes) -> Any:
        if not isinstance(where, str):
            return find(where, self._heard)
        module, _, name = where.partition(":")
        # As in pickle: it waits if another thread is importing the module.
        __import__(module)
        return attrgetter(name)(sys.modules[module])

    def _extension(self, code: int, content: bytes) -> Any:
        load = _UNPACKED.get(code)
        if load is not None:
            return load(content)
        parts = self.unpack(content)
        kind = _TYPES.get(code)
        return _EXTENSIONS[code](self, parts) if kind is None else kind(parts)

    def load_pickle(self, content: list[Any]) -> Any:
        data, digest, first, count = content
        buffers = [self.buffer(index) for index in range(first, first + count)]
        return unpickle(self.code(data, digest) if isinstance(data, int) else data, buffers, self, self.pause)

    def load_buffer(self, content: list[Any]) -> bytes | bytearray:
        index, mutable = content
        source = self.buffer(index)
        target: bytes | bytearray = (_new_bytearray if mutable else _new_bytes)(None, len(source))
        copy_memory(address_of(target), address_of(source), len(source))
        return target

    def load_chunks(self, content: list[Any]) -> list[Any] | dict[Any, Any]:
        kind, index, digest = content
        items: list[Any] = []
        for chunk in unpack_stream(self.code(index, digest), self._extension):
            items += chunk
            if self.pause is not None:
                self.pause()
        return items if kind == "l" else dict(zip(items[::2], items[1::2], strict=True))

    def load_record(self, content: list[Any]) -> Any:
        where, state = content
        record = object.__new__(checked(self.thing(where), "dataclass"))
        record.__dict__.update(state)
        return record

    def build(self, content: list[Any]) -> Any:
        name, args = content
        with decoding_in(self):
            return builder_named(name)(*args)

    def build_alike(self, content: list[Any]) -> list[Any]:
        name, count, columns = content
        build = builder_named(name)
        with decoding_in(self):
            return [build(*args) for args in zip(*(column * (count // len(column)) for column in columns), strict=True)]

    def load_rebuilt(self, content: list[Any]) -> Any:
        check_pickle()
        return rebuild(*content)

    def load_large_array(self, content: list[Any]) -> Any:
        dtype, index, shape, order = content
        if index < 0:
            return self.thing("numpy:empty")(shape, dtype)
        return self.thing("numpy:frombuffer")(self.buffer(index), dtype).reshape(shape, order=order)

    def load_array(self, content: list[Any]) -> Any:
        dtype, data, *shape = content
        array = self.thing("numpy:frombuffer")(bytearray(data), dtype)
        return array.reshape(shape[0]) if shape else array


def _load_tensor(content: bytes) -> Any:
    import torch  # noqa: PLC0415 - optional package

    data, dtype, dim = memoryview(content)[2:], content[0], content[1]
    sizes = () if dim == 1 else [data[at : at + SIZE_BYTES] for at in range(0, dim * SIZE_BYTES, SIZE_BYTES)]
    tensor = torch.frombuffer(bytearray(data[len(sizes) * SIZE_BYTES :]), dtype=getattr(torch, codes.DTYPES[dtype]))
    return tensor if dim == 1 else tensor.view([int.from_bytes(size, "little") for size in sizes])


_UNPACKED: Final[Mapping[int, Callable[[bytes], Any]]] = {BIG_INT: big_int_of, codes.SMALL_TENSOR: _load_tensor}
_TYPES: Final[Mapping[int, Callable[[Any], Any]]] = {
    codes.TUPLE: tuple,
    codes.SET: set,
    codes.FROZENSET: frozenset,
    codes.BYTEARRAY: bytearray,
}
_EXTENSIONS: Final[Mapping[int, Callable[[Decoder, Any], Any]]] = {
    codes.BUFFER: Decoder.load_buffer,
    codes.TENSOR: Decoder.tensor,
    codes.SLOT: lambda decoder, index: decoder.slots[index],
    codes.REF: Decoder.ref,
    codes.PICKLE: Decoder.load_pickle,
    codes.DATACLASS: lambda _, content: build_dataclass(*content),
    codes.NAMEDTUPLE: lambda _, content: build_namedtuple(*content),
    codes.CHUNKS: Decoder.load_chunks,
    codes.RECORD: Decoder.load_record,
    codes.MEMBER: lambda decoder, content: build_member(decoder.thing(content[0]), content[1]),
    codes.ARRAY: Decoder.load_array,
    codes.THING: Decoder.thing,
    codes.BUILT: Decoder.build,
    codes.ALIKE: Decoder.build_alike,
    codes.EXCEPTION: lambda _, content: build_error(*content),
    codes.LARGE_ARRAY: Decoder.load_large_array,
    codes.REBUILT: Decoder.load_rebuilt,
}
_WHOLE: Final = frozenset({wire.PLAIN, SMALL, NAMED})
_SMALL_DECODER: Final = Decoder()


def decode(
    payload: bytes,
    blobs: Sequence[memoryview] = (),
    *,
    slots: Sequence[Any] = (),
    refs: Sequence[Any] = (),
    origin: Callable[[int], Any] = lambda index: None,
    patient: bool = False,
    home: Process | None = None,
) -> Any:
    """Decode a value.

    Args:
        blobs: Tensors of the result use their memory.
        origin: Gives the object of this process that a buffer was made from, if there is one.
        patient: Whether this thread may take long.
        home: The process that decodes, for handles and channels in the value.

    Raises:
        SerializationError: A class is missing here, or something in the value refuses to be built.
    """
    if is_tensor(payload):
        return _decode_tensor(payload, blobs, origin)
    decoder = Decoder()
    decoder.blobs, decoder.slots, decoder.refs, decoder.home = blobs, slots, refs, home
    decoder.pause = yield_gil if patient else None
    try:
        return decoder.decode(payload, origin)
    except Exception as error:
        raise _refused(error) from error
    finally:
        decoder.close()


def _decode_tensor(payload: bytes, blobs: Sequence[Any], origin: Callable[[int], Any]) -> Any:
    original = origin(0)
    if original is not None:
        return original
    try:
        return tensor_in(as_bytes(blobs[0] if blobs else memoryview(b"")), spec_of(payload))
    except Exception as error:
        raise _refused(error) from error


def decode_small(payload: bytes, heard: Mapping[bytes, Definition] = NONE_HEARD) -> Any:
    decoder = _SMALL_DECODER if payload[0] == SMALL else Decoder(heard)
    try:
        return decoder.unpack(memoryview(payload)[1:])
    except Exception as error:
        raise _refused(error) from error
    finally:
        if decoder is not _SMALL_DECODER:
            decoder.close()


def _refused(error: Exception) -> SerializationError:
    return SerializationError(f"a received value cannot be rebuilt here: {error}")


class ReceivedValue:
    __slots__ = ("blobs", "heard", "inline", "origin", "payload", "refs")

    def __init__(
        self,
        payload: bytes,
        inline: bytes | None,
        blobs: list[Any],
        refs: list[Ref[Any]],
        heard: Mapping[bytes, Definition] = NONE_HEARD,
    ) -> None:
        self.payload = payload
        self.inline = inline
        self.blobs = blobs
        self.refs = refs
        # The object that a buffer came from, if the value was made in this process.
        self.origin: Callable[[int], Any] = _no_origin
        # The definitions of the names in it; any other value keeps none of it alive.
        self.heard = heard if payload[0] == NAMED else NONE_HEARD

    @property
    def is_moved_tensor(self) -> bool:
        """Whether it is one tensor of another process, whose bytes came through host memory beside the message."""
        return len(self.blobs) == 1 and is_tensor(self.payload) and self.origin is _no_origin and not self.on_device

    @property
    def on_device(self) -> bool:
        return not all(isinstance(blob, memoryview) for blob in self.blobs)


class Plain:  # noqa: B903 - the name says what the value is
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _no_origin(index: int) -> Any:
    return None
