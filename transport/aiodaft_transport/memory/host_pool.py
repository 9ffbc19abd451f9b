"""Pools of host memory, which a peer can map, or which is private: first touching a page costs ten times a copy."""

from __future__ import annotations

import ctypes
import fcntl
import mmap as memory
import os
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from aiodaft_transport.memory.block_pool import DEFAULT_KEEP, BlockPool, PooledBlock, PooledSegment

__all__ = ["DEFAULT_KEEP", "Arena", "ArenaBlock", "Segment"]


class Segment(PooledSegment):
    """One mapping: a memfd that peers can map too, or private memory (`fd` is then None)."""

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
            # A view is still alive; the mapping goes with the last one.
            return


class ArenaBlock(PooledBlock[Segment]):
    """Part of a segment. `address` and `view` stay valid until it is released and no grant is out."""

    __slots__ = ()

    @property
    def view(self) -> memoryview:
        """The memory itself, writable, as unsigned bytes."""
        return memoryview(self.segment.region)[self.offset : self.offset + self.nbytes]


class Arena(BlockPool[Segment]):
    """Blocks of host memory for one process. Every method may be called in any thread."""

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
