"""What surrounds user code: the peer that it means where it names none (`Channel()`, `empty()`), and its deadline."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from aiodaft._runtime.platform.fork_hooks import when_forked
from aiodaft.exceptions import RuntimeClosed

if TYPE_CHECKING:
    from aiodaft._runtime.peer import Peer

# In a second.
_MICROSECONDS: Final = 1e6
# When the surrounding call, or `aiodaft.deadline()`, ends the time for everything inside; on the loop's clock.
current_deadline: ContextVar[float | None] = ContextVar("aiodaft_current_deadline", default=None)
_context_peer: ContextVar[Peer | None] = ContextVar("aiodaft_peer", default=None)
# Open peers of this process, oldest first. A worker has exactly one.
_open_peers: list[Peer] = []


def time_left(deadline: float | None, clock: Callable[[], float]) -> int | None:
    """What is left of a deadline, as it travels: microseconds, rounded up, so that who has set it notices first."""
    return None if deadline is None else max(0, math.ceil((deadline - clock()) * _MICROSECONDS))


def deadline_of(left: int, clock: Callable[[], float]) -> float:
    """The deadline of which so much is left, where it has travelled to."""
    return clock() + left / _MICROSECONDS


def set_process_peer(peer: Peer) -> None:
    """A peer was opened."""
    when_forked(_leave_all)
    _open_peers.append(peer)
    _context_peer.set(peer)


def remove_process_peer(peer: Peer) -> None:
    """A peer was closed."""
    if peer in _open_peers:
        _open_peers.remove(peer)


def _leave_all() -> None:
    peers = _open_peers[:]
    _open_peers.clear()
    for peer in peers:
        peer.stay_behind()


def current_peer() -> Peer:
    """The peer of the runtime that surrounds the caller, or the only one of the process.

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
