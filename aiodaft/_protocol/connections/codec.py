"""Frames and payloads as MessagePack: the only module that imports msgpack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import msgpack as _untyped_msgpack  # pyright: ignore[reportMissingTypeStubs]

from aiodaft.exceptions import RemoteProtocolError

__all__ = [
    "BIG_INT",
    "MAX_FRAME",
    "Ext",
    "FrameDecoder",
    "FrameEncoder",
    "big_int_of",
    "ext",
    "pack",
    "pack_exts",
    "unpack",
    "unpacker",
]

# A frame carries at most an inline payload (64 KiB), inline buffers (64 KiB) and descriptors of refs.
MAX_FRAME: Final = 16 << 20
_MAX_ITEMS: Final = 1 << 17
BIG_INT: Final = 1
# Of a packer: the system would map and unmap the default size each time.
_FIRST_BUFFER: Final = 1 << 10
# Of each connection; it grows as far as a frame needs. By default each connection would come to use 1 MiB.
_READ_BUFFER: Final = 16 << 10

msgpack: Any = _untyped_msgpack

Ext: Any = msgpack.ExtType
# In C; the constructor of `Ext` checks these in Python.
ext: Final[Callable[[tuple[int, bytes]], Any]] = partial(cast(Any, tuple).__new__, Ext)
ExtHook = Callable[[int, bytes], Any]


class FrameEncoder:
    def __init__(self) -> None:
        # One buffer in the packer would lose its frames when a later frame cannot be packed.
        self.frame: Callable[[Any], bytes] = msgpack.Packer(unicode_errors="surrogatepass").pack
        self.frames: list[bytes] = []

    def pack(self, frame: Any) -> None:
        self.frames.append(self.frame(frame))

    def take(self) -> bytes:
        frames = self.frames
        if len(frames) == 1:
            return frames.pop()
        data = b"".join(frames)
        frames.clear()
        return data


class FrameDecoder:
    def __init__(self) -> None:
        self._unpacker: Any = msgpack.Unpacker(
            use_list=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            read_size=_READ_BUFFER,
            max_buffer_size=2 * MAX_FRAME,
            max_str_len=MAX_FRAME,
            max_bin_len=MAX_FRAME,
            max_array_len=_MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
        )
        self._fed = 0
        # The unpacker limits each field, but not their sum.
        self._unfinished = 0

    def feed(self, data: bytes | bytearray | memoryview) -> list[Any]:
        """Return the frames that `data` completes. After RemoteProtocolError the decoder is of no use."""
        unpacker = self._unpacker
        frames: list[Any] = []
        self._fed = fed = self._fed + len(data)
        try:
            unpacker.feed(data)
            # Asking for an incomplete frame costs more than unpacking a frame.
            while unpacker.tell() < fed:
                frames.append(unpacker.unpack())
        except msgpack.OutOfData:
            # The rest of this one is still to come.
            pass
        except (ValueError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"these bytes are no frame: {str(error) or type(error).__name__}") from error
        if frames:
            self._unfinished = 0
        else:
            self._unfinished += len(data)
            if self._unfinished > MAX_FRAME:
                raise RemoteProtocolError(f"these bytes are no frame: it exceeds {MAX_FRAME} bytes")
        return frames

    def close(self) -> None:
        self._unpacker = None


def big_int(value: Any) -> Any:
    if type(value) is int:
        # Hexadecimal: decimal digits are limited in number, and take quadratic time.
        return ext((BIG_INT, f"{value:x}".encode()))
    raise TypeError(f"cannot pack {type(value).__name__}")


# To make a packer takes longer than to pack most values.
_spare: Final[list[Any]] = []


def pack(value: Any) -> bytes:
    try:
        packer = _spare.pop()
    except IndexError:
        packer = msgpack.Packer(
            default=big_int, strict_types=True, unicode_errors="surrogatepass", buf_size=_FIRST_BUFFER
        )
    packed: bytes = packer.pack(value)
    if len(packed) <= _READ_BUFFER:
        _spare.append(packer)
    return packed


def pack_exts(code: int, value: Any) -> Any:
    return ext((code, pack(value)))


def _no_extensions(code: int, content: bytes) -> Any:
    raise ValueError(f"unexpected extension {code}")


def big_int_of(content: bytes) -> int:
    return int(content, 16)


def _with_big_ints(ext_hook: ExtHook) -> ExtHook:
    return lambda code, content: big_int_of(content) if code == BIG_INT else ext_hook(code, content)


def unpacker(ext_hook: ExtHook) -> partial[Any]:
    return partial(msgpack.unpackb, ext_hook=ext_hook, strict_map_key=False, unicode_errors="surrogatepass")


def unpack(data: bytes | memoryview, ext_hook: ExtHook = _no_extensions) -> Any:
    return unpacker(_with_big_ints(ext_hook))(data)


def unpack_stream(data: memoryview, ext_hook: ExtHook) -> Iterator[Any]:
    unpack_all = msgpack.Unpacker(**unpacker(_with_big_ints(ext_hook)).keywords, max_buffer_size=len(data) + 1)
    unpack_all.feed(data)
    yield from unpack_all
