"""Restarts of actors that end, patience with processes that do not answer, and attempts at calls."""

from __future__ import annotations

from aiodaft._protocol.node.worker import Patience
from aiodaft._protocol.supervision import Backoff, Restart
from aiodaft._runtime.actors.hosted_actor import current_call

__all__ = ["Backoff", "Patience", "Restart", "current_attempt"]


def current_attempt() -> int:
    """The number of this attempt at the running call, from 1; above 1 only in `@method(idempotent=True)` methods.

    Raises:
        RuntimeError: No call runs here.
    """
    call = current_call.get()
    if call is None:
        raise RuntimeError("current_attempt() is for methods of actors: no call runs here")
    return call.attempt + 1
