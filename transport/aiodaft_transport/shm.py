"""Shared memory: consumers map the producer's block copy-on-write.

The producer passes a memfd once per segment and peer over the connection, so a process that dies leaves nothing in the
file system. Consumers cache their private mapping of a segment, because mapping and faulting cost more than the copy.
But a page that a consumer wrote to keeps its private copy when the producer reuses the block. So before a consumer
returns a grant, it finds the private pages (bit 61 of /proc/self/pagemap is clear) and drops them; the kernel then
shows the file's page again.

A consumer that forks while it has a view says so when it returns the grant: its children may have the view, and read
the file's pages, so the producer does not reuse the block. It retires the whole segment, and closes it with its last
block; the kernel frees the memory when the last child has ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from mmap import MADV_DONTNEED, MAP_PRIVATE, PAGESIZE, PROT_READ, PROT_WRITE, mmap
from typing import ClassVar, Final, cast

from aiodaft_transport.abc import Block, Control, Grant, Host, size_of
from aiodaft_transport.exceptions import GrantError
from aiodaft_transport.forks import fork_count
from aiodaft_transport.memory.address import check_target, exposed_view
from aiodaft_transport.memory.grants import segment_of
from aiodaft_transport.memory.host_pool import DEFAULT_KEEP, Arena, ArenaBlock, Segment

_SEGMENT: Final = 1  # id, size: a segment to map; the descriptor comes along
_RETURN: Final = 2  # id: a grant is returned
_GONE: Final = 3  # id: a segment that the producer unmapped
_RETIRE: Final = 4  # id: a grant is returned, and forked children may still read the block
_MISSED: Final = 5  # id: the sender had no room for the descriptor of a segment
_NOTE: Final = struct.Struct("<BQQ")
# Bytes copied in one step: about 0.1 ms.
_SLICE: Final = 1 << 20

# In the top byte of a pagemap entry: bit 7 present, bit 6 swapped, bit 5 page of a file.
_IS_PRIVATE: Final = bytes(1 if byte & 0b1100_0000 and not byte & 0b0010_0000 else 0 for byte in range(256))


class _Mapping:
    """One private mapping of a peer's segment, and its blocks in use."""

    __slots__ = ("address", "busy", "region")

    def __init__(self, fd: int, size: int) -> None:
        self.region = mmap(fd, size, flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.region))
        self.busy: set[int] = set()

    def scrub(self, offset: int, nbytes: int) -> None:
        """Make the range show the shared pages again."""
        first = offset // PAGESIZE
        pages = -(-(offset + nbytes) // PAGESIZE) - first
        try:
            for page in private_pages(self.address + first * PAGESIZE, pages):
                self.region.madvise(MADV_DONTNEED, (first + page) * PAGESIZE, PAGESIZE)
        except OSError:
            # Without a descriptor for the page map, drop all pages.
            self.region.madvise(MADV_DONTNEED, first * PAGESIZE, pages * PAGESIZE)


class _RemoteSegment:
    """A segment of a peer: its descriptor, and a mapping for each concurrent read of the same block."""

    __slots__ = ("fd", "mappings", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.mappings: list[_Mapping] = []

    def mapping_for(self, offset: int) -> _Mapping:
        for mapping in self.mappings:
            if offset not in mapping.busy:
                return mapping
        self.mappings.append(_Mapping(self.fd, self.size))
        return self.mappings[-1]

    def close(self) -> None:
        os.close(self.fd)
        # A live view keeps its mapping; the others are unmapped now.
        self.mappings.clear()


class ShmTransport:
    """Zero-copy transfers between processes of one host."""

    name: ClassVar[str] = "shm"
    shared: ClassVar[bool] = True

    def __init__(self, host: Host, *, keep: int = DEFAULT_KEEP) -> None:
        self._host = host
        self._arena = Arena(shared=True, keep=keep, on_segment_closed=self._segment_closed)
        self._forks = fork_count()
        self._granted: dict[str, dict[int, ArenaBlock]] = {}
        self._last_grant = 0
        self._announced: dict[str, tuple[Control, set[int]]] = {}
        self._segments: dict[str, dict[int, _RemoteSegment]] = {}
        # Segments of peers for which there was no descriptor here.
        self._missed: set[tuple[str, int]] = set()

    @property
    def arena(self) -> Arena:
        """The pool that blocks come from."""
        return self._arena

    def mapped_segments(self) -> int:
        """How many segments of peers are known here."""
        return sum(map(len, self._segments.values()))

    def allocate(self, nbytes: int) -> Block:
        return self._arena.allocate(nbytes)

    def grant(self, block: Block, control: Control) -> Grant:
        block = cast(ArenaBlock, block)
        segment = block.segment
        block.take_grant()
        self._last_grant += 1
        number = self._last_grant
        # Before the note: if the connection breaks while it is sent, `peer_lost` has to find the grant.
        self._granted.setdefault(control.peer, {})[number] = block
        try:
            self._announce(segment, control)
        except BaseException:
            self._take_back(control.peer, number)
            raise
        return (segment.id, block.offset, block.nbytes, number)

    def revoke(self, grant: Grant, control: Control) -> None:
        self._take_back(control.peer, cast(int, grant[3]))

    async def fetch(self, grant: Grant, control: Control) -> memoryview:
        segment_id, offset, nbytes, grant_id = cast(tuple[int, int, int, int], grant)
        try:
            if (control.peer, segment_id) in self._missed:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            segment = segment_of(grant, control, self._segments.get(control.peer, {}))
            mapping = segment.mapping_for(offset)
        except OSError:
            self.decline(grant, control)
            raise
        mapping.busy.add(offset)
        forks = self._forks.value

        def give_back() -> None:
            mapping.scrub(offset, nbytes)
            mapping.busy.discard(offset)
            self._return_grant(grant_id, control, _RETURN if self._forks.value == forks else _RETIRE)

        def dropped(call_soon: Callable[[Callable[[], object]], None] = self._host.call_soon) -> None:
            call_soon(give_back)

        return exposed_view(mapping.region, offset, nbytes, dropped)

    async def fetch_into(self, grant: Grant, control: Control, target: memoryview) -> None:
        try:
            check_target(target, size_of(grant))
        except ValueError:
            self.decline(grant, control)
            raise
        with await self.fetch(grant, control) as source:
            for start in range(0, len(target), _SLICE):
                target[start : start + _SLICE] = source[start : start + _SLICE]
                # Let the loop run; a cancellation arrives here, between two slices.
                await asyncio.sleep(0)

    def decline(self, grant: Grant, control: Control) -> None:
        self._return_grant(cast(int, grant[3]), control)

    def register(self, address: int, nbytes: int) -> None:
        """Nothing to prepare: peers can map only blocks of this process."""

    def unregister(self, address: int) -> None:
        """Nothing was registered."""

    def block_at(self, memory: memoryview) -> Block | None:
        return None

    def note_received(self, control: Control, note: bytes, fds: Sequence[int]) -> None:
        kind, number, size = _NOTE.unpack(note) if len(note) == _NOTE.size else (0, 0, 0)
        known = self._segments.get(control.peer, {})
        if len(fds) > (kind == _SEGMENT) or not _SEGMENT <= kind <= _MISSED or (kind == _SEGMENT and number in known):
            for fd in fds:
                os.close(fd)
            raise GrantError(f"{control.peer} sent an invalid note")
        if kind == _SEGMENT:
            self._segment_came(control, number, size, fds)
        elif kind in {_RETURN, _RETIRE}:
            if not self._take_back(control.peer, number, retire=kind == _RETIRE):
                raise GrantError(f"{control.peer} returned grant {number}, which it does not hold")
        elif kind == _GONE:
            self._missed.discard((control.peer, number))
            segment = known.pop(number, None)
            if segment is not None:
                segment.close()
        elif kind == _MISSED:
            # The next grant sends the segment again.
            self._announced.get(control.peer, (control, set()))[1].discard(number)

    def _segment_came(self, control: Control, number: int, size: int, fds: Sequence[int]) -> None:
        segments = self._segments.setdefault(control.peer, {})
        if fds:
            self._missed.discard((control.peer, number))
            segments[number] = _RemoteSegment(fds[0], size)
        else:
            # Values in the segment cannot be fetched until it is sent again.
            self._missed.add((control.peer, number))
            control.send_note(self.name, _NOTE.pack(_MISSED, number, 0))

    def peer_lost(self, peer: str) -> None:
        self._announced.pop(peer, None)
        for block in self._granted.pop(peer, {}).values():
            # The peer may have forked, and its children may live longer.
            block.retire()
            block.return_grant()
        for segment in self._segments.pop(peer, {}).values():
            segment.close()
        self._missed = {(other, number) for other, number in self._missed if other != peer}

    def close(self) -> None:
        for peer in {*self._announced, *self._granted, *self._segments}:
            self.peer_lost(peer)
        self._arena.close()

    def _announce(self, segment: Segment, control: Control) -> None:
        _, announced = self._announced.setdefault(control.peer, (control, set()))
        if segment.id not in announced:
            assert segment.fd is not None
            control.send_note(self.name, _NOTE.pack(_SEGMENT, segment.id, segment.size), (segment.fd,))
            announced.add(segment.id)

    def _return_grant(self, grant_id: int, control: Control, kind: int = _RETURN) -> None:
        if control.peer in self._segments:
            control.send_note(self.name, _NOTE.pack(kind, grant_id, 0))

    def _take_back(self, peer: str, grant_id: int, *, retire: bool = False) -> bool:
        block = self._granted.get(peer, {}).pop(grant_id, None)
        if block is not None:
            if retire:
                block.retire()
            block.return_grant()
        return block is not None

    def _segment_closed(self, segment_id: int) -> None:
        # The arena calls this in any thread; connections belong to the loop.
        self._host.call_soon(lambda: self._tell_gone(segment_id))

    def _tell_gone(self, segment_id: int) -> None:
        for control, announced in self._announced.values():
            if segment_id in announced:
                announced.discard(segment_id)
                control.send_note(self.name, _NOTE.pack(_GONE, segment_id, 0))


def private_pages(address: int, pages: int) -> Iterator[int]:
    """Indices of the pages from `address` on of which this process has a private copy.

    Source: Documentation/admin-guide/mm/pagemap.rst of the Linux kernel.
    """
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGESIZE * 8)
        entries = pagemap.read(pages * 8)
    flags = entries[7::8].translate(_IS_PRIVATE)
    index = flags.find(1)
    while index >= 0:
        yield index
        index = flags.find(1, index + 1)
