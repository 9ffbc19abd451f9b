"""The consumer's end of a stream: items come in as far as there is credit, and are taken one by one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiodaft._protocol.ids import CallId
from aiodaft._protocol.messages import CANCEL
from aiodaft.exceptions import DaftError

from .kept import Arrived
from .refs import RefState, release_inputs
from .tasks import shield_from_anyio

if TYPE_CHECKING:
    from .link import Link
    from .peer import Peer

# Items that the producer may be ahead of the consumer.
CREDIT_WINDOW: Final = 16


class StreamState:
    """One stream, in the process that consumes it."""

    def __init__(self, peer: Peer, number: CallId, label: str) -> None:
        self.peer = peer
        self.number = number
        self.label = label
        self.link: Link | None = None
        self.inputs: list[RefState] | None = None
        # Encoded items, items on their way, and (in a tuple) objects of this process.
        self._items: deque[Arrived | asyncio.Task[Arrived] | tuple[Any]] = deque()
        self._taken = 0
        self._error: BaseException | None = None
        self._over = False
        self._closing = False
        self._changed: asyncio.Future[None] | None = None
        self._watchers: list[Callable[[StreamState], object]] = []

    # Answers to the call.

    def on_plain(self, value: Any) -> None:
        """The producer is through."""
        self._end(None)

    def on_item(self, arrived: Arrived | asyncio.Task[Arrived]) -> None:
        """One more item."""
        self._items.append(arrived)
        self._wake()

    def on_local_item(self, value: Any) -> None:
        """One more item, from an actor of this process."""
        self._items.append((value,))
        self._wake()

    def on_result(self, arrived: Arrived) -> None:
        """Never: streams give items."""
        self._end(None)

    def on_stored(self) -> None:
        """Never: streams give items."""
        self._end(None)

    def on_error(self, error: BaseException) -> None:
        """The producer failed."""
        self._end(error)

    def on_lost(self, error: DaftError) -> None:
        """The connection to the producer ended."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        self._error = error
        release_inputs(self, failed=error is not None)
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            self.peer.loop.call_soon(watcher, self)
        self._wake()

    def watch(self, callback: Callable[[StreamState], object]) -> None:
        """Call back once the producer has ended."""
        if self._over:
            self.peer.loop.call_soon(callback, self)
        else:
            self._watchers.append(callback)

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def _wait_change(self) -> None:
        self.peer.check_open(f"{self.label} cannot be awaited")
        if self._changed is None:
            self._changed = self.peer.loop.create_future()
        # Several tasks may take from one stream; cancelling one must not wake the others.
        await asyncio.shield(self._changed)

    # Consuming.

    async def next_item(self) -> Any:
        """The next item.

        Raises:
            StopAsyncIteration: There are no more.
            BaseException: What the producer raised, after its last item.
        """
        while not self._items:
            if self._over or self._closing:
                error, self._error = self._error, None
                if error is not None and not self._closing:
                    raise error
                raise StopAsyncIteration
            await self._wait_change()
        # Taken at once, so that two tasks never take the same item; put back if the taking is cancelled.
        item = self._items.popleft()
        try:
            value = await self._open(item)
        except asyncio.CancelledError:
            self._items.appendleft(item)
            raise
        except Exception:
            # It is used up: a consumer that goes on must not run out of credit.
            self._count_taken()
            raise
        self._count_taken()
        return value

    async def _open(self, item: Arrived | asyncio.Task[Arrived] | tuple[Any]) -> Any:
        if isinstance(item, tuple):
            return item[0]
        arrived = item if isinstance(item, Arrived) else await asyncio.shield(item)
        return await self.peer.store.decode(arrived, refs=arrived.refs)

    def _count_taken(self) -> None:
        # Half a window at a time: one message for many items.
        self._taken += 1
        if self._taken >= CREDIT_WINDOW // 2 and not self._over:
            taken, self._taken = self._taken, 0
            self.peer.give_credit(self, taken)

    async def aclose(self) -> None:
        """End the producer and wait for its cleanup, at most for the grace time."""
        self._items.clear()
        if not self._closing:
            self._cancel()
        with shield_from_anyio(), suppress(TimeoutError):
            async with asyncio.timeout(self.peer.grace):
                while not self._over:
                    await self._wait_change()
        self._end(None)

    def handle_dropped(self) -> None:
        """The `Stream` object is gone: nobody will take another item. Safe in any thread."""
        if not self._over and not self._closing:
            self.peer.call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._closing or self._over:
            return
        self._closing = True
        self._items.clear()
        if self.link is None:
            self.peer.cancel_local(self.number)
        elif self.link.withdraw(self.number):
            self._end(None)
        else:
            self.link.send((CANCEL, self.number))
