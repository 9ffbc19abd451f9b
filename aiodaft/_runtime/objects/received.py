"""Values on their way in. What a peer granted is fetched or goes back: it belongs to an object, as memory does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aiodaft.ref import Ref
from aiodaft_transport import Grant

if TYPE_CHECKING:
    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.peer import Peer


# Name of a transport, and what it granted.
Blob: TypeAlias = tuple[str, Grant]


class Delivery:
    """A value as a message brought it; made when that is handled, before anything can be cancelled.

    A task may end between any two of its steps, also before its first, and then drops what it was given. So nobody has
    to think of it: what is not fetched goes back when the last one drops this, as a view's grant does with the view.
    """

    __slots__ = ("_granted", "_peer", "connection", "inline", "payload", "refs")

    def __init__(self, peer: Peer, connection: Route, payload: bytes, blobs: Any, refs: tuple[Any, ...]) -> None:
        self._peer = peer
        self.connection = connection
        self.payload = payload
        self.refs = refs
        self.inline: bytes | None = None if isinstance(blobs, tuple) else blobs
        self._granted: deque[Blob] = deque(blobs if isinstance(blobs, tuple) else ())

    def granted(self) -> Blob | None:
        """What is to be fetched next."""
        return self._granted[0] if self._granted else None

    def taken(self) -> None:
        """A transport begins to fetch it, and sees to it from now on."""
        self._granted.popleft()

    def decline(self) -> None:
        """Give back what was not fetched. Idempotent."""
        while self._granted:
            name, grant = self._granted.popleft()
            self._peer.store.transport_named(name).decline(grant, self.connection)

    def __del__(self) -> None:
        if self._granted:
            self._peer.process.call_soon(partial(Delivery.decline, self))


class ReceivedValue:  # noqa: B903 - on the path of every call: a dataclass costs more
    """A value as it came: not decoded yet."""

    __slots__ = ("blobs", "inline", "origin", "payload", "refs")

    def __init__(self, payload: bytes, inline: bytes | None, blobs: list[Any], refs: list[Ref[Any]]) -> None:
        self.payload = payload
        self.inline = inline
        # Views of host memory, and tensors of bytes on accelerators.
        self.blobs = blobs
        self.refs = refs
        # Where the value was made in this very process: gives the objects its buffers came from.
        self.origin: Callable[[int], Any] = _no_origin


def _no_origin(index: int) -> Any:
    return None
