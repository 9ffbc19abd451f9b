"""Values that were received and are not decoded yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiodaft.ref import Ref


class ReceivedValue:  # noqa: B903 - on the path of every call: a dataclass costs more
    """An encoded value."""

    __slots__ = ("blobs", "inline", "origin", "payload", "refs")

    def __init__(self, payload: bytes, inline: bytes | None, blobs: list[Any], refs: list[Ref[Any]]) -> None:
        self.payload = payload
        self.inline = inline
        # Views of host memory, and tensors of bytes on accelerators.
        self.blobs = blobs
        self.refs = refs
        # Returns the object that a buffer came from, if the value was made in this process.
        self.origin: Callable[[int], Any] = _no_origin


def _no_origin(index: int) -> Any:
    return None
