"""Encoded values to Python values. Buffers are not copied: tensors and arrays use the memory of the blobs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from aiodaft._protocol.connections.codec import Ext, pack, pack_exts, unpack, unpack_stream
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization import encoder as wire
from aiodaft._runtime.serialization.containers import rebuild_dataclass
from aiodaft._runtime.serialization.definitions import Definition
from aiodaft._runtime.serialization.pickling import unpickle, yield_gil
from aiodaft._runtime.serialization.small import NAMED, SMALL, TUPLE, decode_named, unpack_small
from aiodaft._runtime.serialization.tensors import Spec, TensorMaker
from aiodaft.exceptions import SerializationError
from aiodaft_transport.memory.address import address_of, copy_memory

_new_bytes: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
_new_bytearray: Final = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype = ctypes.py_object
_new_bytearray.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]


_REFUSED: Final = "a received value cannot be rebuilt here"
_SOLE_TENSOR: Final = pack(pack_exts(wire.TENSOR, 0))


def is_heavy(payload: bytes) -> bool:
    """Whether decoding takes long and belongs in a helper thread."""
    return bool(payload[0] & wire.HEAVY)


def sole_tensor(payload: bytes) -> Spec | None:
    """The spec of the tensor, if the value is one tensor and nothing else."""
    if payload[0] != wire.TABLE:
        return None
    table, specs, skeleton = unpack(memoryview(payload)[1:], Ext)
    return specs[0] if len(table) == len(specs) == 1 and skeleton == _SOLE_TENSOR else None


class Decoder:
    """Decodes one value."""

    def __init__(
        self,
        blobs: Sequence[memoryview],
        slots: Sequence[Any],
        refs: Sequence[Any],
        origin: Callable[[int], Any],
        pause: Callable[[], None] | None,
        home: Process | None,
    ) -> None:
        self.home = home
        self._blobs = blobs
        self._slots = slots
        self._refs = refs
        self._origin = origin
        self._pause = pause
        self._table: list[list[int]] = []
        self._tensors: TensorMaker | None = None

    def decode(self, payload: bytes) -> Any:
        """Return the value."""
        try:
            return self._decode(payload)
        finally:
            # It refers to this object, and so would keep the buffers alive.
            self._tensors = None

    def _decode(self, payload: bytes) -> Any:
        kind, body = payload[0] & ~wire.HEAVY, memoryview(payload)[1:]
        if kind == wire.PLAIN:
            return unpack(body, self._extension)
        self._table, specs, *rest = unpack(body, self._extension)
        self._tensors = TensorMaker(specs, self.buffer, self._origin)
        return unpack(rest[0] if rest else self.buffer(-1), self._extension)

    def buffer(self, index: int) -> memoryview:
        """One of the value's buffers."""
        blob, offset, nbytes = self._table[index]
        return self._blobs[blob][offset : offset + nbytes] if nbytes else memoryview(b"")

    def tensor(self, index: int) -> Any:
        """The tensor with this number."""
        assert self._tensors is not None
        return self._tensors.make(index)

    def ref(self, index: int) -> Any:
        """The ref with this number."""
        return self._refs[index]

    def _extension(self, code: int, content: bytes) -> Any:
        return _EXTENSIONS[code](self, unpack(content, self._extension))

    def load_pickle(self, content: list[Any]) -> Any:
        data, first, count = content
        buffers = [self.buffer(index) for index in range(first, first + count)]
        return unpickle(self.buffer(data) if isinstance(data, int) else data, buffers, self, self._pause)

    def load_buffer(self, content: list[Any]) -> bytes | bytearray:
        index, mutable = content
        source = self.buffer(index)
        target: bytes | bytearray = (_new_bytearray if mutable else _new_bytes)(None, len(source))
        copy_memory(address_of(target), address_of(source), len(source))
        return target

    def load_chunks(self, content: list[Any]) -> list[Any] | dict[Any, Any]:
        kind, index = content
        items: list[Any] = []
        for chunk in unpack_stream(self.buffer(index), self._extension):
            items += chunk
            if self._pause is not None:
                self._pause()
        return items if kind == "l" else dict(zip(items[::2], items[1::2], strict=True))

    def load_dataclass(self, content: list[Any]) -> Any:
        cls, fields = content
        return rebuild_dataclass(cls, fields)

    def load_slot(self, index: int) -> Any:
        return self._slots[index]


_EXTENSIONS: Final[dict[int, Callable[[Decoder, Any], Any]]] = {
    TUPLE: lambda decoder, items: tuple(items),
    wire.SET: lambda decoder, items: set(items),
    wire.FROZENSET: lambda decoder, items: frozenset(items),
    wire.BYTEARRAY: lambda decoder, content: bytearray(content),
    wire.BUFFER: Decoder.load_buffer,
    wire.TENSOR: Decoder.tensor,
    wire.SLOT: Decoder.load_slot,
    wire.REF: Decoder.ref,
    wire.PICKLE: Decoder.load_pickle,
    wire.DATACLASS: Decoder.load_dataclass,
    wire.NAMEDTUPLE: lambda decoder, content: content[0](*content[1]),
    wire.CHUNKS: Decoder.load_chunks,
}


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
        payload: The skeleton.
        blobs: The blobs; tensors of the result use their memory.
        slots: Values of the resolved refs.
        refs: The refs that travel inside.
        origin: Gives the object of this process that a buffer was made from, if there is one.
        patient: Whether this thread may take long.
        home: The process that decodes, for handles and channels in the value.

    Raises:
        SerializationError: A class is missing here, or something in the value refuses to be built.
    """
    if payload[0] in (SMALL, NAMED):
        return decode_small(payload)
    try:
        return Decoder(blobs, slots, refs, origin, yield_gil if patient else None, home).decode(payload)
    except Exception as error:
        raise SerializationError(f"{_REFUSED}: {error}") from error


def decode_small(payload: bytes, heard: Mapping[bytes, Definition] = MappingProxyType({})) -> Any:
    """Decode a small value, with what the names in it stand for; raises what `decode` does."""
    try:
        return unpack_small(memoryview(payload)[1:]) if payload[0] == SMALL else decode_named(payload, heard)
    except Exception as error:
        raise SerializationError(f"{_REFUSED}: {error}") from error
