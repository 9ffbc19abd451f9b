"""Addresses, copies that let other threads run, and views with a callback at their end."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from typing import Any, Final

__all__ = ["ALIGNMENT", "PAGESIZE", "address_of", "aligned", "check_target", "copy_memory", "exposed_view", "view_at"]

# torch and numpy read fastest, and every dtype is aligned, on cache line boundaries.
ALIGNMENT: Final = 64
# Between chunks a cancelled copy can stop and another thread's copy gets its turn.
_CHUNK: Final = 4 << 20
_PyBUF_SIMPLE: Final = 0
# The exposed views, which are not hashable, by the ids of these.
_exposed: Final[dict[int, weakref.ref[Any]]] = {}


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer (stable ABI since 3.11): the only way to the address of a read-only buffer."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None


def aligned(offset: int) -> int:
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def address_of(buffer: Any) -> int:
    """Address of a contiguous buffer. The caller keeps the buffer alive, and exported if it could be resized."""
    info = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(info), _PyBUF_SIMPLE)
    try:
        return int(info.buf or 0)
    finally:
        _release_buffer(ctypes.byref(info))


def view_at(address: int, nbytes: int, owner: object) -> memoryview:
    """A writable view of memory that belongs to `owner`, and keeps it alive."""
    exporter = (ctypes.c_char * nbytes).from_address(address)
    exporter.owner = owner  # type: ignore[attr-defined]  # an attribute of its own
    return memoryview(exporter).cast("B")


def check_target(target: memoryview, nbytes: int) -> None:
    """Raise ValueError unless `target` is writable memory of exactly that many bytes."""
    if target.readonly or not target.c_contiguous or target.nbytes != nbytes:
        kind = "read-only" if target.readonly else "contiguous" if target.c_contiguous else "scattered"
        raise ValueError(f"{nbytes} bytes cannot be fetched into {target.nbytes} bytes of {kind} memory")


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy between two addresses. Other threads run meanwhile: ctypes drops the interpreter lock for each chunk."""
    for start in range(0, nbytes, _CHUNK):
        ctypes.memmove(target + start, source + start, min(_CHUNK, nbytes - start))


def exposed_view(region: mmap, offset: int, nbytes: int, on_dropped: Callable[[], object]) -> memoryview:
    """A writable view of part of a mapping; `on_dropped` runs once nothing refers to those bytes any more.

    It may run in any thread and while garbage is collected, so it must do no more than put something on a queue.
    """
    exporter = (ctypes.c_char * nbytes).from_buffer(region, offset)

    def dropped(view: weakref.ref[Any]) -> None:
        del _exposed[id(view)]
        on_dropped()

    # `weakref.finalize` costs several times as much.
    view = weakref.ref(exporter, dropped)
    _exposed[id(view)] = view
    return memoryview(exporter).cast("B")
