"""The waiting part of a transfer that cannot be stopped: its waiter may go before it is over."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class BasePull(Generic[ResultT]):
    """One transfer. `done` is for its waiter; the transfer is over when nothing touches its memory any more."""

    def __init__(self) -> None:
        self.done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self.is_over = False
        self._ended: asyncio.Future[None] | None = None

    def set_error(self, error: Exception) -> None:
        """Fail the waiter, if it waits and knows no result yet."""
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
