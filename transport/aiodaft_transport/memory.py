"""Memory to send from and to receive into.

Getting memory costs far more than copying into it, so blocks are reused. Values of up to 16 MiB share segments, one
size class per segment; larger ones get a segment of their own. Free memory beyond `keep` bytes goes back, oldest first.

Memory of the user is read and written in place, and registered once for any number of transfers. A region stays
registered while a block of it is referred to, a grant of such a block is out, or a transfer into it is under way. All
of them keep the memory itself alive.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap as memory
import os
import threading
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import Any, Final, Generic, TypeAlias, TypeVar

from aiodaft_transport.exceptions import GrantError, TransportError

__all__ = [
    "ALIGNMENT",
    "DEFAULT_KEEP",
    "PAGESIZE",
    "Arena",
    "ArenaBlock",
    "Segment",
    "address_of",
    "aligned",
    "check_target",
    "copy_memory",
    "exposed_view",
    "view_at",
]

_SMALLEST: Final = 64 << 10
_LARGEST_SHARED: Final = 16 << 20
_MAX_SHARED_SEGMENT: Final = 64 << 20
_MIN_SHARED_SEGMENT: Final = 4 << 20
_OWN_ROUNDING: Final = 2 << 20
# A block takes at most so many times its bytes: so a free segment serves a value that leaves no more than a fifth of
# it.
_BEST_FIT: Final = 1.25
DEFAULT_KEEP: Final = 512 << 20


class PooledSegment(ABC):
    __slots__ = ("address", "capacity", "free", "id", "kept", "live", "retired", "size")

    def __init__(self, segment_id: int, size: int, capacity: int, address: int) -> None:
        self.id = segment_id
        self.size = size
        self.capacity = capacity
        self.address = address
        # Popped from the end: the block freed last has the warmest pages.
        self.free = list(range((size // capacity - 1) * capacity, -1, -capacity))
        self.live = 0
        self.retired = False
        # Records of other transports, dropped while the memory of the segment is still mapped.
        self.kept: dict[str, object] = {}

    @abstractmethod
    def close(self) -> None:
        """No block of it is in use."""


S = TypeVar("S", bound=PooledSegment)


class Pullable:
    """Memory of this process that peers may pull, of the host or of a device."""

    __slots__ = ("_unread", "grants", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.grants = 0
        self._unread: list[Callable[[], object]] = []

    def take_grant(self) -> None:
        self.grants += 1

    def return_grant(self) -> None:
        self.grants -= 1
        self._tell_if_unread()

    def _tell_if_unread(self) -> None:
        if not self.grants:
            unread, self._unread = self._unread, []
            for callback in unread:
                callback()

    def on_unread(self, callback: Callable[[], object]) -> None:
        """Call back, on the loop, once the last grant is returned."""
        self._unread.append(callback)

    def release(self) -> None:
        """The block is reused once all its grants are returned. Idempotent, safe in any thread."""

    def retire(self) -> None:
        """A forked child may still read the memory."""


class Unmapped(Pullable, ABC):
    """Memory that is not the host's: a transport that sends its bytes has each part copied first."""

    __slots__ = ()

    @abstractmethod
    async def read_into(self, address: int, start: int, nbytes: int) -> None:
        """Copy `nbytes` bytes, from byte `start` on, to an address of the host.

        Cancellation: the copy may go on.

        Raises:
            TransportError: The device failed.
        """


class PooledBlock(Pullable, Generic[S]):
    __slots__ = ("offset", "pool", "released", "segment")

    def __init__(self, pool: BlockPool[S], segment: S, offset: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self.pool = pool
        self.segment = segment
        self.offset = offset
        self.released = False

    @property
    def address(self) -> int:
        return self.segment.address + self.offset

    def belongs_to(self, pool: object) -> bool:
        return self.pool is pool

    def release(self) -> None:
        with self.pool.lock:
            if not self.released:
                self.released = True
                self.pool.reuse_if_idle(self)

    def retire(self) -> None:
        self.segment.retired = True

    def take_grant(self) -> None:
        with self.pool.lock:
            if self.released and not self.grants:
                raise GrantError("the block was released before it was granted")
            self.grants += 1

    def return_grant(self) -> None:
        with self.pool.lock:
            self.grants -= 1
            self.pool.reuse_if_idle(self)
        self._tell_if_unread()


class BlockPool(ABC, Generic[S]):
    """Every method may be called in any thread."""

    def __init__(
        self,
        *,
        keep: int = DEFAULT_KEEP,
        next_number: Callable[[], int] | None = None,
        on_segment_closed: Callable[[int], object] | None = None,
    ) -> None:
        self.keep = keep
        # Names a segment, or something else, maybe of another pool.
        self.next_number = next_number or itertools.count(1).__next__
        self._on_segment_closed = on_segment_closed
        # Reentrant: freeing memory can collect garbage, and garbage can release blocks.
        self.lock = threading.RLock()
        self._classes: dict[int, list[S]] = {}
        self._own: list[S] = []
        # Garbage collected meanwhile must not trim the segment that is about to be handed out.
        self._allocating = False
        self._closed = False

    @abstractmethod
    def _make_segment(self, number: int, size: int, capacity: int) -> S: ...

    def _take(self, nbytes: int) -> tuple[S, int]:
        if nbytes <= 0:
            raise ValueError(f"a block has at least one byte, not {nbytes}")
        with self.lock:
            if self._closed:
                raise TransportError("the transport is closed")
            self._allocating = True
            try:
                segment = self._shared_segment(nbytes) if nbytes <= _LARGEST_SHARED else self._own_segment(nbytes)
                offset = segment.free.pop()
                segment.live += 1
            finally:
                self._allocating = False
            return segment, offset

    def owns(self, block: Pullable) -> bool:
        return isinstance(block, PooledBlock) and block.belongs_to(self)

    def idle_bytes(self) -> int:
        with self.lock:
            return sum(segment.size for segment in self._segments() if not segment.live)

    def live_blocks(self) -> int:
        with self.lock:
            return sum(segment.live for segment in self._segments())

    def close(self) -> None:
        with self.lock:
            self._closed = True
            for segment in list(self._segments()):
                self._drop(segment)

    def _segments(self) -> list[S]:
        return [*(s for segments in self._classes.values() for s in segments), *self._own]

    def _shared_segment(self, nbytes: int) -> S:
        # Four classes between two powers of two.
        step = max(_SMALLEST, 1 << (nbytes - 1).bit_length()) >> 3
        capacity = max(_SMALLEST, -(-nbytes // step) * step)
        segments = self._classes.setdefault(capacity, [])
        for segment in segments:
            if segment.free and not segment.retired:
                return segment
        count = min(_MAX_SHARED_SEGMENT // capacity, max(_MIN_SHARED_SEGMENT // capacity, 16))
        size = -(-count * capacity // _OWN_ROUNDING) * _OWN_ROUNDING
        segments.append(self._make_segment(self.next_number(), size, capacity))
        return segments[-1]

    def _own_segment(self, nbytes: int) -> S:
        fitting = [s for s in self._own if not (s.live or s.retired) and nbytes <= s.size <= nbytes * _BEST_FIT]
        if fitting:
            return min(fitting, key=lambda segment: segment.size)
        size = -(-nbytes // _OWN_ROUNDING) * _OWN_ROUNDING
        self._own.append(self._make_segment(self.next_number(), size, size))
        return self._own[-1]

    def reuse_if_idle(self, block: PooledBlock[S]) -> None:
        if not block.released or block.grants or self._closed:
            return
        segment = block.segment
        segment.live -= 1
        if not segment.retired:
            segment.free.append(block.offset)
        if not segment.live and segment in self._own:
            # Most recently used last: that is where trimming does not look first.
            self._own.remove(segment)
            self._own.append(segment)
        self._trim()

    def _trim(self) -> None:
        if self._allocating:
            return
        idle = [segment for segment in self._segments() if not segment.live]
        surplus = sum(segment.size for segment in idle) - self.keep
        for segment in idle:
            if segment.retired or surplus > 0:
                surplus -= segment.size
                self._drop(segment)

    def _drop(self, segment: S) -> None:
        for segments in (self._own, *self._classes.values()):
            if segment in segments:
                segments.remove(segment)
        segment.kept.clear()
        if self._on_segment_closed is not None:
            # While the memory is still mapped: it may be registered with a device.
            self._on_segment_closed(segment.id)
        segment.close()


class Segment(PooledSegment):
    """A memfd that peers can map too, or private memory (`fd` is then None)."""

    __slots__ = ("_anchor", "fd", "region")

    def __init__(self, segment_id: int, size: int, capacity: int, *, shared: bool) -> None:
        self.fd = _sealed_memfd(size) if shared else None
        try:
            self.region = _huge_memory(size) if self.fd is None else mmap(self.fd, size)
        except BaseException:
            if self.fd is not None:
                os.close(self.fd)
            raise
        self._anchor: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_buffer(self.region)
        super().__init__(segment_id, size, capacity, ctypes.addressof(self._anchor))

    def close(self) -> None:
        self._anchor = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        try:
            self.region.close()
        except BufferError:
            return


class ArenaBlock(PooledBlock[Segment]):
    __slots__ = ()

    @property
    def view(self) -> memoryview:
        return memoryview(self.segment.region)[self.offset : self.offset + self.nbytes]


class Arena(BlockPool[Segment]):
    def __init__(
        self, *, shared: bool, keep: int = DEFAULT_KEEP, on_segment_closed: Callable[[int], object] | None = None
    ) -> None:
        super().__init__(keep=keep, on_segment_closed=on_segment_closed)
        self._shared = shared

    def allocate(self, nbytes: int) -> ArenaBlock:
        return ArenaBlock(self, *self._take(nbytes), nbytes)

    def _make_segment(self, number: int, size: int, capacity: int) -> Segment:
        return Segment(number, size, capacity, shared=self._shared)


def _huge_memory(size: int) -> mmap:
    region = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    # Copying from another process is twice as fast in large pages, and faulting them in five times.
    with suppress(OSError, AttributeError):
        region.madvise(memory.MADV_HUGEPAGE)
    return region


def _sealed_memfd(size: int) -> int:
    fd = os.memfd_create("aiodaft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # A peer that shrank the file would make every reader die of SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


# torch and numpy read fastest, and every dtype is aligned, on cache line boundaries.
ALIGNMENT: Final = 64
# Between chunks a cancelled copy can stop, and another thread's copy gets its turn.
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
    """The caller keeps the buffer alive, and exported if it could be resized."""
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
    if target.readonly or not target.c_contiguous or target.nbytes != nbytes:
        kind = "read-only" if target.readonly else "contiguous" if target.c_contiguous else "scattered"
        raise ValueError(f"{nbytes} bytes cannot be fetched into {target.nbytes} bytes of {kind} memory")


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Other threads run meanwhile: ctypes drops the interpreter lock for each chunk."""
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
    """When it is not referred to any more, `on_closed` gets its number, in any thread."""

    __slots__ = ("__weakref__", "address", "id", "size")

    def __init__(self, number: int, address: int, size: int, on_closed: Callable[[int], object]) -> None:
        self.id = number
        self.address = address
        self.size = size
        weakref.finalize(self, on_closed, number).atexit = False


class LentBlock(Pullable):
    """Part of a region, which belongs to the user."""

    __slots__ = ("address", "offset", "segment", "view")

    def __init__(self, region: Region, view: memoryview) -> None:
        super().__init__(view.nbytes)
        self.segment = region
        self.view = view
        self.address = address_of(view)
        self.offset = self.address - region.address


class LoanedBlock(LentBlock):
    """A block of another transport of this process, the grants of which are grants of that block."""

    __slots__ = ("_original",)

    def __init__(self, region: Region, original: ArenaBlock) -> None:
        super().__init__(region, original.view)
        self._original = original

    def take_grant(self) -> None:
        self._original.take_grant()

    def return_grant(self) -> None:
        self._original.return_grant()


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
        address, starts = address_of(view), self._starts
        index = bisect_right(starts, address)
        region = self._regions.get(starts[index - 1]) if index else None
        if region is None or address + view.nbytes > region.address + region.size:
            return None
        return LentBlock(region, view)

    def find_or_make(self, view: memoryview) -> LentBlock:
        return self.find(view) or LentBlock(self._region(address_of(view), view.nbytes), view)

    def _region(self, address: int, nbytes: int) -> Region:
        return Region(self._next_number(), address, nbytes, self._on_closed)
