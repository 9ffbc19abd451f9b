"""A value in a message: its grants are fetched, or go back."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, TypeAlias

from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.store import Store
from aiodaft_transport import Grant

# Name of a transport, and what it granted.
Blob: TypeAlias = tuple[str, Grant]


class Delivery:
    """A value as a message brought it; made when the message is handled, before anything can be cancelled.

    A task may be cancelled between any two of its steps, also before its first. What was not fetched by then goes back
    when the delivery is dropped.
    """

    __slots__ = ("_granted", "_store", "connection", "inline", "payload", "refs")

    def __init__(self, store: Store, connection: Route, payload: bytes, blobs: Any, refs: tuple[Any, ...]) -> None:
        self._store = store
        self.connection = connection
        self.payload = payload
        self.refs = refs
        self.inline: bytes | None = None if isinstance(blobs, tuple) else blobs
        self._granted: deque[Blob] = deque(blobs if isinstance(blobs, tuple) else ())

    def granted(self) -> Blob | None:
        """The next blob to fetch."""
        return self._granted[0] if self._granted else None

    def taken(self) -> None:
        """A transport begins to fetch it, and is responsible for it from now on."""
        self._granted.popleft()

    def decline(self) -> None:
        """Give back what was not fetched. Idempotent."""
        while self._granted:
            self._store.decline(self.connection, (self._granted.popleft(),))

    def __del__(self) -> None:
        if self._granted:
            self._store.call_soon(partial(Delivery.decline, self))
