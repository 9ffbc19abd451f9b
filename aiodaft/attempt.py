"""Calls that are made again: which time this is."""

from __future__ import annotations

from aiodaft._runtime.actors.hosted_actor import current_call

__all__ = ["current_attempt"]


def current_attempt() -> int:
    """Inside a method: the how manieth attempt at this call it is; 1 unless the method is `@method(idempotent=True)`.

    Raises:
        RuntimeError: No call runs here.
    """
    call = current_call.get()
    if call is None:
        raise RuntimeError("current_attempt() is for methods of actors: no call runs here")
    return call.attempt + 1
