"""Memory of the user: read and written in place, and registered once for any number of transfers.

Nothing here is released by hand: a region stays registered while a block of it is referred to, a grant of such a block
is out, or a transfer into it is under way. All of them keep the memory itself alive.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from typing import Any, Final, TypeAlias

from aiodaft_transport.memory.block_pool import ArenaBlock, Pullable

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


class Region:
    """A range of memory. When it is not referred to any more, `on_closed` gets its number, in any thread."""

    __slots__ = ("__weakref__", "address", "id", "size")

    def __init__(self, number: int, address: int, size: int, on_closed: Callable[[int], object]) -> None:
        self.id = number
        self.address = address
        self.size = size
        weakref.finalize(self, on_closed, number).atexit = False


class LentBlock(Pullable):
    """Part of a region. There is nothing to release or to retire: the memory belongs to the user."""

    __slots__ = ("address", "offset", "segment", "view")

    def __init__(self, region: Region, view: memoryview) -> None:
        super().__init__(view.nbytes)
        self.segment = region
        self.view = view
        self.address = address_of(view)
        self.offset = self.address - region.address


class LoanedBlock(LentBlock):
    """A block of another transport of this process. Its grants are grants of that block."""

    __slots__ = ("_original",)

    def __init__(self, region: Region, original: ArenaBlock) -> None:
        super().__init__(region, original.view)
        self._original = original

    def take_grant(self) -> None:
        self._original.take_grant()

    def return_grant(self) -> None:
        self._original.return_grant()


# Memory of the host that peers may pull.
Block: TypeAlias = ArenaBlock | LentBlock


class Regions:
    """The registered regions of one process, which do not overlap. Every method may be called in any thread."""

    def __init__(self, next_number: Callable[[], int], on_closed: Callable[[int], object]) -> None:
        self._next_number = next_number
        self._on_closed = on_closed
        # Reentrant: garbage can be collected anywhere, and tensors among it unregister themselves.
        self._lock = threading.RLock()
        self._regions: dict[int, Region] = {}
        # Never changed but replaced, so that a search is not led astray.
        self._starts: list[int] = []

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            if address not in self._regions:
                self._regions[address] = self._region(address, nbytes)
                starts = self._starts.copy()
                insort(starts, address)
                self._starts = starts

    def remove(self, address: int) -> None:
        with self._lock:
            self._starts = [start for start in self._starts if start != address]
            self._regions.pop(address, None)

    def find(self, view: memoryview) -> LentBlock | None:
        """The block that this memory is, if it lies within one region."""
        address, starts = address_of(view), self._starts
        index = bisect_right(starts, address)
        region = self._regions.get(starts[index - 1]) if index else None
        if region is None or address + view.nbytes > region.address + region.size:
            return None
        return LentBlock(region, view)

    def find_or_make(self, view: memoryview) -> LentBlock:
        """The same, and if there is none, in a region that ends with the block."""
        return self.find(view) or LentBlock(self._region(address_of(view), view.nbytes), view)

    def _region(self, address: int, nbytes: int) -> Region:
        return Region(self._next_number(), address, nbytes, self._on_closed)
