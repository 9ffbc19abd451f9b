"""The interface of a transport: a process grants peers its memory, and they pull it.

The producer *allocates* a block, fills it, and *grants* it to a peer: a grant is a small tuple that travels over
the connection. The consumer *fetches* the grant and gets a memoryview; when its last view is freed, the consumer
returns the grant. A block is reused once its owner released it and every grant is returned. Transfers do not depend
on the order of messages, so they cannot deadlock, and no size is declared in advance.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, cast

from aiodaft_transport.memory import Block, BlockPool

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
