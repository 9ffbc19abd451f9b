"""Who wants to hear of the end of a call, and who wants it to end. Both may be said in any thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodaft._protocol.ownership import Tenure

if TYPE_CHECKING:
    from aiodaft._runtime.peer import Peer


class Watched(Tenure):
    """One value, as others wait for it.

    Attributes:
        peer: The process that knows it.
        label: What made it, such as "Model.execute".
    """

    peer: Peer
    # Defaults live in the class: most refs are awaited, and that is all.
    _watchers: list[Callable[[Any], object]] | None = None
    _interested = 0

    @property
    def label(self) -> str:
        raise NotImplementedError

    def check_loop(self) -> None:
        """Raise RuntimeError unless this is the loop that the runtime was opened on."""
        if asyncio._get_running_loop() is not self.peer.loop:
            raise RuntimeError(f"{self.label} is awaited on another event loop than the one its runtime was opened on")

    def watch(self, callback: Callable[[Any], object], *, interested: bool = False) -> None:
        """Call back, on the loop, once the call is settled; never within this call.

        Somebody who is interested counts as an awaiter: the call is not cancelled while they are there.
        """
        if not self.peer.is_here:
            self.peer.call_soon(partial(self.watch, callback, interested=interested))
            return
        self._interested += interested
        if self.settled:
            self.peer.loop.call_soon(callback, self)
        elif self._watchers is None:
            self._watchers = [callback]
        else:
            self._watchers.append(callback)

    def unwatch(self, callback: Callable[[Any], object]) -> int:
        """Undo `watch` of somebody who was interested; returns how many registrations there were.

        Raises:
            RuntimeError: This is another thread, which cannot know in time.
        """
        if not self.peer.is_here:
            raise RuntimeError(f"a callback of {self.label} is removed in the thread of its event loop only")
        before = len(self._watchers or ())
        self._watchers = [watcher for watcher in self._watchers or () if watcher != callback]
        removed = before - len(self._watchers)
        self._interested -= removed
        return removed

    def cancel(self, why: str) -> bool:
        """Ask for the call to be cancelled; False if it is over already."""
        if self.settled or self.peer.is_here:
            return not self.settled and self._cancel(why)
        # After the call itself, which this thread may have handed to the loop just now.
        self.peer.call_soon(partial(self.cancel, why))
        return True

    def _cancel(self, why: str) -> bool:
        """See `cancel`; on the loop, and it is not over."""
        return False
