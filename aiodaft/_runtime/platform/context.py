"""What user code inherits from its surroundings: the open peer that it means where it names none, and its deadline."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, Protocol

from aiodaft._runtime.platform.fork_hooks import when_forked
from aiodaft.exceptions import RuntimeClosed

# In a second.
_MICROSECONDS: Final = 1e6


class OpenPeer(Protocol):
    """What this file knows of a peer."""

    def stay_behind(self) -> None:
        """In a forked child: leave connections and actors to the parent."""
        ...


# The deadline of the surrounding call or of `aiodaft.deadline()`, on the loop's clock.
current_deadline: ContextVar[float | None] = ContextVar("aiodaft_current_deadline", default=None)
_context_peer: ContextVar[OpenPeer | None] = ContextVar("aiodaft_peer", default=None)
# Open peers of this process, oldest first. A worker has exactly one.
_open_peers: list[OpenPeer] = []


def time_left(deadline: float | None, clock: Callable[[], float]) -> int | None:
    """The microseconds until a deadline, as messages carry them; rounded up, so that it passes at the caller first."""
    return None if deadline is None else max(0, math.ceil((deadline - clock()) * _MICROSECONDS))


def deadline_of(left: int, clock: Callable[[], float]) -> float:
    """The deadline, on this process's clock, that a message gives as `time_left`."""
    return clock() + left / _MICROSECONDS


def peer_opened(peer: OpenPeer) -> None:
    """Make this the peer of the current context."""
    when_forked(_leave_all)
    _open_peers.append(peer)
    _context_peer.set(peer)


def peer_closed(peer: OpenPeer) -> None:
    """Forget a peer. Idempotent."""
    if peer in _open_peers:
        _open_peers.remove(peer)


def _leave_all() -> None:
    peers = _open_peers[:]
    _open_peers.clear()
    for peer in peers:
        peer.stay_behind()


def surrounding_peer() -> OpenPeer:
    """The peer of the runtime that surrounds the caller, or the only open one of the process.

    Raises:
        RuntimeClosed: There is none, or there are several and none surrounds the caller.
    """
    peer = _context_peer.get()
    if peer is not None and peer in _open_peers:
        return peer
    if len(_open_peers) == 1:
        return _open_peers[0]
    if not _open_peers:
        raise RuntimeClosed("no runtime is open: use this inside `async with aiodaft.Runtime()`")
    raise RuntimeClosed(f"{len(_open_peers)} runtimes are open: use this inside the `async with` of the one you mean")
