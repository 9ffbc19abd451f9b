"""Pools of memory: first touching a page costs ten times more than copying into it, so blocks are reused.

Values of up to 16 MiB share segments, one size class per segment; larger ones get a segment of their own. Free
memory beyond `keep` bytes goes back to the kernel, oldest first.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

from .exceptions import GrantError, TransportError

_SMALLEST: Final = 64 << 10
_LARGEST_SHARED: Final = 16 << 20
_MAX_SHARED_SEGMENT: Final = 64 << 20
_MIN_SHARED_SEGMENT: Final = 4 << 20
_OWN_ROUNDING: Final = 2 << 20
# A free segment may serve a request if no more than a third of it is left over.
_BEST_FIT: Final = 1.5
DEFAULT_KEEP: Final = 512 << 20


class Segment:
    """One mapping: a memfd that peers can map too, or private memory (`fd` is then None)."""

    __slots__ = ("_anchor", "address", "capacity", "fd", "free", "id", "live", "region", "size")

    def __init__(self, segment_id: int, size: int, capacity: int, *, shared: bool) -> None:
        self.id = segment_id
        self.size = size
        self.capacity = capacity
        self.fd = _sealed_memfd(size) if shared else None
        try:
            self.region = _huge_memory(size) if self.fd is None else mmap(self.fd, size)
        except BaseException:
            if self.fd is not None:
                os.close(self.fd)
            raise
        self._anchor: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_buffer(self.region)
        self.address = ctypes.addressof(self._anchor)
        # Popped from the end: the block freed last has the warmest pages.
        self.free = list(range(size - capacity, -1, -capacity))
        self.live = 0

    def close(self) -> None:
        self._anchor = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        try:
            self.region.close()
        except BufferError:
            # A view is still alive; the mapping goes with the last one.
            return


class Readable:
    """What may be granted: counts the peers that may read it."""

    __slots__ = ("_unread", "grants")

    def __init__(self) -> None:
        self.grants = 0
        self._unread: list[Callable[[], object]] = []

    def take_grant(self) -> None:
        """One more peer may read it."""
        self.grants += 1

    def return_grant(self) -> None:
        """One peer is done with it."""
        self.grants -= 1
        self._tell_if_unread()

    def on_unread(self, callback: Callable[[], object]) -> None:
        """Call back once the last grant that is out now, or given until then, is back."""
        self._unread.append(callback)

    def _tell_if_unread(self) -> None:
        if not self.grants:
            unread, self._unread = self._unread, []
            for callback in unread:
                callback()


class ArenaBlock(Readable):
    """Part of a segment. `address` and `view` stay valid until it is released and no grant is out."""

    __slots__ = ("_arena", "nbytes", "offset", "released", "segment")

    def __init__(self, arena: Arena, segment: Segment, offset: int, nbytes: int) -> None:
        super().__init__()
        self._arena = arena
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.released = False

    @property
    def address(self) -> int:
        return self.segment.address + self.offset

    @property
    def view(self) -> memoryview:
        return memoryview(self.segment.region)[self.offset : self.offset + self.nbytes]

    def release(self) -> None:
        self._arena.release(self)

    def take_grant(self) -> None:
        self._arena.take_grant(self)

    def return_grant(self) -> None:
        self._arena.return_grant(self)
        self._tell_if_unread()


class Arena:
    """Blocks of pooled memory for one process. Every method may be called in any thread."""

    def __init__(
        self, *, shared: bool, keep: int = DEFAULT_KEEP, on_segment_closed: Callable[[int], None] | None = None
    ) -> None:
        self._shared = shared
        self._keep = keep
        self._on_segment_closed = on_segment_closed
        # Reentrant: freeing memory can collect garbage, and garbage can release blocks.
        self._lock = threading.RLock()
        self._classes: dict[int, list[Segment]] = {}
        self._own: list[Segment] = []
        # Names a segment, or something else that must not be taken for one.
        self.next_number: Callable[[], int] = itertools.count(1).__next__
        # Garbage collected meanwhile must not trim the segment that is about to be handed out.
        self._allocating = False
        self._closed = False

    def allocate(self, nbytes: int) -> ArenaBlock:
        """Return a block of `nbytes` bytes, 64-byte aligned."""
        if nbytes <= 0:
            raise ValueError(f"a block has at least one byte, not {nbytes}")
        with self._lock:
            if self._closed:
                raise TransportError("the transport is closed")
            self._allocating = True
            try:
                segment = self._shared_segment(nbytes) if nbytes <= _LARGEST_SHARED else self._own_segment(nbytes)
                offset = segment.free.pop()
                segment.live += 1
            finally:
                self._allocating = False
            return ArenaBlock(self, segment, offset, nbytes)

    def release(self, block: ArenaBlock) -> None:
        """See `Block.release`."""
        with self._lock:
            if not block.released:
                block.released = True
                self._reuse_if_idle(block)

    def take_grant(self, block: ArenaBlock) -> None:
        """See `ArenaBlock.take_grant`."""
        with self._lock:
            if block.released and not block.grants:
                raise GrantError("the block was released before it was granted")
            block.grants += 1

    def return_grant(self, block: ArenaBlock) -> None:
        """See `ArenaBlock.return_grant`."""
        with self._lock:
            block.grants -= 1
            self._reuse_if_idle(block)

    def idle_bytes(self) -> int:
        """Bytes of whole segments that hold no block."""
        with self._lock:
            return sum(segment.size for segment in self._segments() if not segment.live)

    def live_blocks(self) -> int:
        """How many blocks are in use."""
        with self._lock:
            return sum(segment.live for segment in self._segments())

    def close(self) -> None:
        """Unmap everything that nobody looks at."""
        with self._lock:
            self._closed = True
            for segment in list(self._segments()):
                self._drop(segment)

    def _segments(self) -> list[Segment]:
        return [*(s for segments in self._classes.values() for s in segments), *self._own]

    def _shared_segment(self, nbytes: int) -> Segment:
        capacity = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        segments = self._classes.setdefault(capacity, [])
        for segment in segments:
            if segment.free:
                return segment
        size = min(_MAX_SHARED_SEGMENT, max(_MIN_SHARED_SEGMENT, 16 * capacity))
        segments.append(self._new_segment(size, capacity))
        return segments[-1]

    def _own_segment(self, nbytes: int) -> Segment:
        fitting = [s for s in self._own if not s.live and nbytes <= s.size <= nbytes * _BEST_FIT]
        if fitting:
            return min(fitting, key=lambda segment: segment.size)
        size = -(-nbytes // _OWN_ROUNDING) * _OWN_ROUNDING
        self._own.append(self._new_segment(size, size))
        return self._own[-1]

    def _new_segment(self, size: int, capacity: int) -> Segment:
        return Segment(self.next_number(), size, capacity, shared=self._shared)

    def _reuse_if_idle(self, block: ArenaBlock) -> None:
        if not block.released or block.grants or self._closed:
            return
        segment = block.segment
        segment.free.append(block.offset)
        segment.live -= 1
        if not segment.live and segment in self._own:
            # Most recently used last: that is where trimming does not look first.
            self._own.remove(segment)
            self._own.append(segment)
        self._trim()

    def _trim(self) -> None:
        if self._allocating:
            return
        idle = [segment for segment in self._segments() if not segment.live]
        surplus = sum(segment.size for segment in idle) - self._keep
        for segment in idle:
            if surplus <= 0:
                return
            surplus -= segment.size
            self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        for segments in (self._own, *self._classes.values()):
            if segment in segments:
                segments.remove(segment)
        if self._on_segment_closed is not None:
            # While the memory is still mapped: it may be registered with a device.
            self._on_segment_closed(segment.id)
        segment.close()


def _huge_memory(size: int) -> mmap:
    region = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    # Copying from another process is twice as fast in large pages, and faulting them in five times.
    with suppress(OSError):
        region.madvise(MADV_HUGEPAGE)
    return region


def _sealed_memfd(size: int) -> int:
    fd = os.memfd_create("aiodaft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # A peer that shrank the file would make every reader die of SIGBUS.
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
