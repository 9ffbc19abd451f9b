"""Values as messages bring them."""

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


class Plain:  # noqa: B903 - as above
    """A value that is a field of a message as it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _no_origin(index: int) -> Any:
    return None
