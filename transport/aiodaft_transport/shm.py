"""Shared memory: consumers map the producer's block copy-on-write.

The producer passes a memfd once per segment and peer over the connection, so a process that dies leaves nothing in the
file system. Consumers cache their private mapping of a segment, because mapping and faulting cost more than the copy.
But a page that a consumer wrote to keeps its private copy when the producer reuses the block. So before a consumer
returns a grant, it finds the private pages (bit 61 of /proc/self/pagemap is clear) and drops them; the kernel then
shows the file's page again.

A consumer that forks while it has a view says so when it returns the grant: its children may have the view, and read
the file's pages, so the producer does not reuse the block. It retires the whole segment, and closes it with its last
block; the kernel frees the memory when the last child has ended.

A producer also admits peers to a block, to write there: they map its segment shared.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from functools import partial
from mmap import MADV_DONTNEED, MAP_PRIVATE, PAGESIZE, PROT_READ, PROT_WRITE, mmap
from typing import ClassVar, Final, cast

from aiodaft_transport.abc import GONE, RETURN, SEGMENT, Control, Grant, Host, SegmentRemote, SegmentTransport, size_of
from aiodaft_transport.exceptions import GrantError
from aiodaft_transport.memory import DEFAULT_KEEP, Arena, ArenaBlock, Block, Segment, check_target, exposed_view
from aiodaft_transport.system import fork_count

# Source: Documentation/admin-guide/mm/pagemap.rst of the Linux kernel.

# In the top byte of an entry: bit 7 present, bit 6 swapped, bit 5 page of a file.
_IS_PRIVATE: Final = bytes(1 if byte & 0b1100_0000 and not byte & 0b0010_0000 else 0 for byte in range(256))


class PageMap:
    """The page map of this process stays open, because to open it takes longer than to read it."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._forks = fork_count()
        self._opened_at = 0

    def private_pages(self, address: int, pages: int) -> Iterator[int]:
        """The pages from `address` on of which this process has a private copy."""
        if self._opened_at != self._forks.value:
            self.close()
        if self._fd is None:
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._opened_at = self._forks.value
        entries = os.pread(self._fd, pages * 8, address // PAGESIZE * 8)
        flags = entries[7::8].translate(_IS_PRIVATE)
        index = flags.find(1)
        while index >= 0:
            yield index
            index = flags.find(1, index + 1)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_RETIRE: Final = 4  # id: a grant is returned, and forked children may still read the block
_MISSED: Final = 5  # id: the sender had no room for the descriptor of a segment
# Bytes copied in one step: about 0.1 ms.
_SLICE: Final = 1 << 20


class _Mapping:
    __slots__ = ("address", "busy", "region")

    def __init__(self, fd: int, size: int) -> None:
        self.region = mmap(fd, size, flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.region))
        self.busy: set[int] = set()

    def scrub(self, offset: int, nbytes: int, page_map: PageMap) -> None:
        first = offset // PAGESIZE
        pages = -(-(offset + nbytes) // PAGESIZE) - first
        try:
            for page in page_map.private_pages(self.address + first * PAGESIZE, pages):
                self.region.madvise(MADV_DONTNEED, (first + page) * PAGESIZE, PAGESIZE)
        except OSError:
            # Without a descriptor for the page map, drop all pages.
            self.region.madvise(MADV_DONTNEED, first * PAGESIZE, pages * PAGESIZE)


class _RemoteSegment:
    __slots__ = ("_shared", "fd", "mappings", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.mappings: list[_Mapping] = []
        self._shared: mmap | None = None

    @property
    def shared(self) -> mmap:
        if self._shared is None:
            self._shared = mmap(self.fd, self.size)
        return self._shared

    def idle_mapping(self, offset: int) -> _Mapping | None:
        for mapping in self.mappings:
            if offset not in mapping.busy:
                return mapping
        return None

    def mapping_for(self, offset: int) -> _Mapping:
        mapping = self.idle_mapping(offset)
        if mapping is None:
            mapping = _Mapping(self.fd, self.size)
            self.mappings.append(mapping)
        return mapping

    def close(self) -> None:
        os.close(self.fd)
        # A live view keeps its mapping; the others are unmapped now.
        self.mappings.clear()
        self._shared = None


class _Remote(SegmentRemote[_RemoteSegment]):
    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.missed: set[int] = set()


class ShmTransport(SegmentTransport[Block, _Remote]):
    name: ClassVar[str] = "shm"
    shared: ClassVar[bool] = True

    def __init__(self, host: Host, *, keep: int = DEFAULT_KEEP) -> None:
        super().__init__(host)
        self.arena = Arena(shared=True, keep=keep, on_segment_closed=self._segment_closed)
        self._forks = fork_count()
        self._page_map = PageMap()

    def mapped_segments(self) -> int:
        return sum(len(remote.segments) for remote in self.remotes.values())

    def pools(self) -> Sequence[Arena]:
        return (self.arena,)

    def allocate(self, nbytes: int) -> ArenaBlock:
        return self.arena.allocate(nbytes)

    async def fetch(self, grant: Grant, control: Control) -> memoryview:
        with self._declining(grant, control, OSError):
            remote, segment = self._source_of(grant, control)
            mapping = segment.mapping_for(cast(int, grant[1]))
        return self._view(remote, mapping, grant)

    def _source_of(self, grant: Grant, control: Control) -> tuple[_Remote, _RemoteSegment]:
        if control.peer in self.remotes and grant[0] in self.remotes[control.peer].missed:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.source_of(grant, control)

    def fetch_now(self, grant: Grant, control: Control) -> memoryview | None:
        segment_id, offset, nbytes, _ = cast(tuple[int, int, int, int], grant)
        remote = self.remotes.get(control.peer)
        segment = None if remote is None else remote.segments.get(segment_id)
        # A wrong grant is an error of `fetch`.
        if remote is None or segment is None or not 0 <= offset < offset + nbytes <= segment.size:
            return None
        mapping = segment.idle_mapping(offset)
        return None if mapping is None else self._view(remote, mapping, grant)

    def _view(self, remote: _Remote, mapping: _Mapping, grant: Grant) -> memoryview:
        _, offset, nbytes, number = cast(tuple[int, int, int, int], grant)
        mapping.busy.add(offset)
        forks = self._forks.value

        def give_back() -> None:
            if self._closed:
                return
            mapping.scrub(offset, nbytes, self._page_map)
            mapping.busy.discard(offset)
            self._send(remote, RETURN if self._forks.value == forks else _RETIRE, number)

        return exposed_view(mapping.region, offset, nbytes, partial(self._host.call_soon, give_back))

    async def fetch_into(self, grant: Grant, control: Control, target: memoryview) -> None:
        with self._declining(grant, control, ValueError):
            check_target(target, size_of(grant))
        with await self.fetch(grant, control) as source:
            for start in range(0, len(target), _SLICE):
                target[start : start + _SLICE] = source[start : start + _SLICE]
                # A cancellation arrives here, between two slices.
                await asyncio.sleep(0)

    def admit(self, block: Block, control: Control) -> Grant | None:
        return self.grant(block, control) if self.arena.owns(block) else None

    def place(self, grant: Grant, control: Control) -> memoryview:
        _, offset, nbytes, _ = cast(tuple[int, int, int, int], grant)
        _, segment = self._source_of(grant, control)
        return memoryview(segment.shared)[offset : offset + nbytes]

    def close(self) -> None:
        self._closed = True
        self._lose_all()
        self._page_map.close()
        self.arena.close()

    def _meet(self, control: Control) -> _Remote:
        return _Remote(control)

    def _tell(self, segment: Segment, remote: _Remote) -> None:
        assert segment.fd is not None
        self._send(remote, SEGMENT, segment.id, segment.size, fds=(segment.fd,))

    def _noted(self, remote: _Remote, kind: int, number: int, size: int, body: bytes, fds: list[int]) -> bool:
        if body or len(fds) > (kind == SEGMENT):
            return False
        if kind == SEGMENT and number not in remote.segments:
            if fds:
                remote.missed.discard(number)
                remote.segments[number] = _RemoteSegment(fds.pop(), size)
            else:
                # Values in the segment cannot be fetched until it is sent again.
                remote.missed.add(number)
                self._send(remote, _MISSED, number)
        elif kind in {RETURN, _RETIRE}:
            if kind == _RETIRE and number in remote.granted:
                remote.granted[number].retire()
            if not remote.take_back(number):
                raise GrantError(f"{remote.control.peer} returned grant {number}, which it does not hold")
        elif kind == GONE:
            remote.missed.discard(number)
            if number in remote.segments:
                remote.segments.pop(number).close()
        elif kind == _MISSED:
            # The next grant sends the segment again.
            remote.told.discard(number)
        else:
            return False
        return True

    def _part(self, remote: _Remote) -> None:
        for block in remote.granted.values():
            # The peer may have forked, and its children may live longer.
            block.retire()
        for segment in remote.segments.values():
            segment.close()
