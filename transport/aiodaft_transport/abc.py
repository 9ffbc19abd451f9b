"""The interface of a transport, and the common parts: a process grants peers its memory, and they pull it.

The producer *allocates* a block, fills it, and *grants* it to a peer: a grant is a small tuple that travels over
the connection. The consumer *fetches* the grant and gets a memoryview; when its last view is freed, the consumer
returns the grant. A block is reused once its owner released it and every grant is returned. Transfers do not depend
on the order of messages, so they cannot deadlock, and no size is declared in advance.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar, cast

from aiodaft_transport.exceptions import GrantError, TransportError
from aiodaft_transport.memory import Block, BlockPool, LentBlock, PooledBlock, Pullable, Regions

Grant: TypeAlias = tuple[int | str | bytes, ...]


def size_of(grant: Grant) -> int:
    return cast(int, grant[2])


class Control(Protocol):
    """The connection to one peer, as a transport sees it."""

    @property
    def peer(self) -> str: ...

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        """Send a small note to the same transport in the peer, in order with all other messages.

        `fds` are duplicated into the peer; the caller keeps its own.
        """
        ...


class Host(Protocol):
    def call_soon(self, callback: Callable[[], object], /) -> None:
        """Run `callback` on the process's event loop; callable in any thread, also while it is collecting garbage."""
        ...

    def create_task(self, coro: Coroutine[Any, Any, None], /, *, name: str) -> None: ...

    def connect(self, peer: str, /) -> Awaitable[socket.socket]:
        """Open a stream of bytes to a peer: its transport of the same name gets the other end by `stream_came`.

        Only `tcp` needs streams. Both ends belong to this cluster, and have proved it.

        Raises:
            OSError: There is no stream, or no descriptor for one.
            TransportError: The peer is gone, or out of reach.
        """
        ...


class Transport(Protocol):
    """One way to move payload between two processes."""

    name: ClassVar[str]
    # Whether consumers read the producer's own memory, so that another consumer costs no copy.
    shared: ClassVar[bool]

    def pools(self) -> Sequence[BlockPool[Any]]: ...

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least `nbytes` bytes (more than zero). Safe in any thread.

        Raises:
            OSError: The system refuses the memory, or a descriptor for it.
        """
        ...

    def grant(self, block: Block, control: Control) -> Grant:
        """Let the peer at `control` pull `block`. The block stays until that peer returns the grant or is gone.

        `control.send_note` may find that the peer is gone, and call `peer_lost` before it returns: that ends this
        grant too.

        Raises:
            OSError: The system refuses a descriptor that the peer needs. Nothing is granted.
        """
        ...

    def adopt(self, block: Block) -> Block:
        """A block of any transport of this process as one that this transport grants. Its memory is not moved.

        Grants of the returned block keep `block`, as its own do.
        """
        ...

    def revoke(self, grant: Grant, control: Control) -> None:
        """Take back a grant that was not sent to the peer, or one of `admit`; does nothing if the peer is gone."""
        ...

    def fetch(self, grant: Grant, control: Control) -> Awaitable[memoryview]:
        """Bring the granted bytes here: writable, private to this process, 64-byte aligned.

        The grant is returned when the last view of the result is freed, and when the fetch is cancelled.

        Raises:
            OSError: The system refuses the memory, or a descriptor for it. The grant is returned.
        """
        ...

    def fetch_now(self, grant: Grant, control: Control) -> memoryview | None:
        """As `fetch`, if it needs no more than a view of memory that is mapped here; else None, and nothing is done."""
        ...

    def fetch_into(self, grant: Grant, control: Control, target: memoryview) -> Awaitable[None]:
        """Bring the granted bytes into memory of the caller, which is as large as the granted block.

        When it returns or raises, the grant is returned and the transport no longer writes to the memory; so a
        cancellation waits for a transfer that cannot be stopped. After an error or a cancellation, the memory is any
        mixture of the block and the earlier content.

        Raises:
            ValueError: The memory has another size, or is read-only. Nothing was written.
        """
        ...

    def decline(self, grant: Grant, control: Control) -> None: ...

    def admit(self, block: Block, control: Control) -> Grant | None:
        """Let the peer at `control` write to `block`, until the grant is revoked. None if it cannot.

        If the peer is lost before, it may still write: the memory is not reused.

        Raises:
            OSError: The system refuses a descriptor that the peer needs. Nothing is granted.
        """
        ...

    def place(self, grant: Grant, control: Control) -> memoryview:
        """The memory of the peer that has admitted this process, to write to until the peer revokes the grant.

        Raises:
            GrantError: It is not known here.
            OSError: The system refuses the memory, or a descriptor for it.
        """
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Prepare memory of the caller for any number of transfers. Idempotent, safe in any thread.

        The memory must stay mapped until it is unregistered, and its blocks and the fetches into it have ended.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` for new transfers. Transfers under way are not affected. Safe in any thread."""
        ...

    def block_at(self, memory: memoryview) -> Block | None:
        """Registered memory, or part of it, as a block that peers pull from in place. Safe in any thread.

        The block keeps the memory alive as long as it is referred to or granted. None if the memory is not
        registered, or if this transport grants only blocks that it allocated.
        """
        ...

    def block_of(self, memory: memoryview) -> Block | None:
        """The same for any memory: unregistered memory is prepared for this block, which keeps it prepared."""
        ...

    def note_received(self, control: Control, note: bytes, fds: Sequence[int]) -> None:
        """Takes over the ownership of `fds`, which is empty if this process had no room for the descriptors."""
        ...

    def stream_came(self, peer: str, stream: socket.socket) -> None: ...

    def peer_lost(self, peer: str) -> None:
        """Forget a peer: its grants end, and its memory is not mapped for new fetches."""
        ...

    def close(self) -> None:
        """Views keep their own memory. Idempotent."""
        ...


# The common part of the transports: a process knows its peers, their grants, and the segments of both sides.

ResultT = TypeVar("ResultT")


class BasePull(Generic[ResultT]):
    """`done` is for the waiter; the transfer is over when nothing touches its memory any more."""

    def __init__(self) -> None:
        self.done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self.is_over = False
        self._ended: asyncio.Future[None] | None = None

    def set_error(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            # The waiter may have been cancelled: mark the error as seen.
            self.done.exception()

    def set_over(self) -> None:
        self.is_over = True
        if self._ended is not None:
            self._ended.set_result(None)

    async def wait_over(self) -> None:
        """Wait until nothing touches the memory any more, also after `done` has failed.

        Cancellation: does not end it, because the transfer cannot be stopped. A caller that was cancelled passes its
        cancellation on.
        """
        while not self.is_over:
            if self._ended is None:
                self._ended = asyncio.get_running_loop().create_future()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._ended])


# Notes; a transport may have more kinds.
NOTE: Final = struct.Struct("<BQQ")
SEGMENT: Final = 1  # id, size; then the data that a peer needs to read the segment
RETURN: Final = 2  # id: a grant is returned
GONE: Final = 3  # id: the sender closes a segment


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


SegmentT = TypeVar("SegmentT", bound=_Sized)
BlockT = TypeVar("BlockT", bound=PooledBlock[Any] | LentBlock)


class Remote:
    def __init__(self) -> None:
        self.granted: dict[int, Pullable] = {}

    def take_back(self, number: int) -> bool:
        block = self.granted.pop(number, None)
        if block is not None:
            block.return_grant()
        return block is not None


class SegmentRemote(Remote, Generic[SegmentT]):
    def __init__(self, control: Control) -> None:
        super().__init__()
        self.control = control
        # The segments of this process that it was told of, and those of its own that are known here.
        self.told: set[int] = set()
        self.segments: dict[int, SegmentT] = {}


RemoteT = TypeVar("RemoteT", bound=Remote)
SegmentRemoteT = TypeVar("SegmentRemoteT", bound=SegmentRemote[Any])


class PeerTransport(ABC, Generic[BlockT, RemoteT]):
    name: ClassVar[str]
    shared: ClassVar[bool] = False

    def __init__(self, host: Host) -> None:
        self._host = host
        self.remotes: dict[str, RemoteT] = {}
        self._grants = itertools.count(1)
        self._regions: Regions | None = None
        self._closed = False

    @abstractmethod
    def _meet(self, control: Control) -> RemoteT: ...

    @abstractmethod
    def _offer(self, block: BlockT, remote: RemoteT) -> tuple[int | str, int]:
        """Returns the place of the block, for the grant."""

    @abstractmethod
    def _part(self, remote: RemoteT) -> None:
        """The peer's grants end afterwards."""

    def grant(self, block: BlockT, control: Control) -> Grant:
        remote, number = self._remote(control), next(self._grants)
        block.take_grant()
        # Before any note: if the connection breaks while it is sent, `peer_lost` has to find the grant.
        remote.granted[number] = block
        try:
            place = self._offer(block, remote)
        except BaseException:
            remote.take_back(number)
            raise
        return (*place, block.nbytes, number)

    def adopt(self, block: Block) -> Block:
        return block

    def revoke(self, grant: Grant, control: Control) -> None:
        if control.peer in self.remotes:
            self.remotes[control.peer].take_back(cast(int, grant[3]))

    @abstractmethod
    def decline(self, grant: Grant, control: Control) -> None: ...

    @contextmanager
    def _declining(self, grant: Grant, control: Control, error: type[BaseException] = BaseException) -> Generator[None]:
        try:
            yield
        except error:
            self.decline(grant, control)
            raise

    def fetch_now(self, grant: Grant, control: Control) -> memoryview | None:
        return None

    def admit(self, block: BlockT, control: Control) -> Grant | None:
        return None

    def place(self, grant: Grant, control: Control) -> memoryview:
        raise GrantError(f"{control.peer} granted memory that is only read")

    def register(self, address: int, nbytes: int) -> None:
        if self._regions is not None:
            self._regions.add(address, nbytes)

    def unregister(self, address: int) -> None:
        if self._regions is not None:
            self._regions.remove(address)

    def block_at(self, memory: memoryview) -> Block | None:
        return None if self._regions is None else self._regions.find(memory)

    def block_of(self, memory: memoryview) -> Block | None:
        return None if self._regions is None else self._regions.find_or_make(memory)

    def stream_came(self, peer: str, stream: socket.socket) -> None:
        stream.close()

    def peer_lost(self, peer: str) -> None:
        remote = self.remotes.pop(peer, None)
        if remote is not None:
            self._part(remote)
            while remote.granted:
                remote.granted.popitem()[1].return_grant()

    def _lose_all(self) -> None:
        for peer in list(self.remotes):
            self.peer_lost(peer)

    def _remote(self, control: Control) -> RemoteT:
        remote = self.remotes.get(control.peer)
        if remote is None:
            if self._closed:
                raise TransportError("the transport is closed")
            remote = self.remotes[control.peer] = self._meet(control)
        return remote


class SegmentTransport(PeerTransport[BlockT, SegmentRemoteT]):
    """Tells each peer once of each segment of which it is granted a block, and when the segment is gone."""

    @abstractmethod
    def _tell(self, segment: Any, remote: SegmentRemoteT) -> None: ...

    @abstractmethod
    def _noted(self, remote: SegmentRemoteT, kind: int, number: int, size: int, body: bytes, fds: list[int]) -> bool:
        """Removes descriptors that are kept from `fds`; False if the note is invalid."""

    def _offer(self, block: BlockT, remote: SegmentRemoteT) -> tuple[int, int]:
        segment = block.segment
        if segment.id not in remote.told:
            self._tell(segment, remote)
            remote.told.add(segment.id)
        return segment.id, block.offset

    def source_of(self, grant: Grant, control: Control) -> tuple[SegmentRemoteT, Any]:
        remote = self.remotes.get(control.peer)
        segment = segment_of(grant, control, {} if remote is None else self._readable(remote))
        # A peer that is not known has no segments.
        assert remote is not None
        return remote, segment

    def _readable(self, remote: SegmentRemoteT) -> Mapping[int, Any]:
        return remote.segments

    def decline(self, grant: Grant, control: Control) -> None:
        if control.peer in self.remotes:
            self._send(self.remotes[control.peer], RETURN, cast(int, grant[3]))

    def note_received(self, control: Control, note: bytes, fds: Sequence[int]) -> None:
        left = list(fds)
        try:
            if self._closed:
                return
            kind, number, size = NOTE.unpack_from(note) if len(note) >= NOTE.size else (0, 0, 0)
            if not self._noted(self._remote(control), kind, number, size, note[NOTE.size :], left):
                raise GrantError(f"{control.peer} sent an invalid note")
        finally:
            for fd in left:
                os.close(fd)

    def _send(
        self, remote: SegmentRemoteT, kind: int, number: int, size: int = 0, body: bytes = b"", fds: Sequence[int] = ()
    ) -> None:
        # A note to a peer that is gone would reach its successor.
        if self.remotes.get(remote.control.peer) is remote:
            remote.control.send_note(self.name, NOTE.pack(kind, number, size) + body, fds)

    def _segment_closed(self, number: int) -> None:
        # Pools call this in any thread; connections belong to the loop.
        self._host.call_soon(lambda: self._tell_gone(number))

    def _tell_gone(self, number: int) -> None:
        for remote in list(self.remotes.values()):
            if number in remote.told:
                remote.told.discard(number)
                self._send(remote, GONE, number)


def segment_of(grant: Grant, control: Control, segments: Mapping[int, SegmentT]) -> SegmentT:
    number, offset, nbytes, _ = cast(tuple[int, int, int, int], grant)
    segment = segments.get(number)
    if segment is None or not 0 <= offset < offset + nbytes <= segment.size:
        raise GrantError(f"{control.peer} granted bytes {offset}..{offset + nbytes} of unknown segment {number}")
    return segment
