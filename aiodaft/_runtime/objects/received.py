"""Values as messages bring them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiodaft._runtime.serialization.decoder import is_tensor
from aiodaft._runtime.serialization.definitions import NONE_HEARD, Definition
from aiodaft._runtime.serialization.small import NAMED
from aiodaft.ref import Ref


class ReceivedValue:
    """An encoded value."""

    __slots__ = ("blobs", "heard", "inline", "origin", "payload", "refs")

    def __init__(
        self,
        payload: bytes,
        inline: bytes | None,
        blobs: list[Any],
        refs: list[Ref[Any]],
        heard: Mapping[bytes, Definition] = NONE_HEARD,
    ) -> None:
        self.payload = payload
        self.inline = inline
        # Views of host memory, and tensors of bytes on accelerators.
        self.blobs = blobs
        self.refs = refs
        # Returns the object that a buffer came from, if the value was made in this process.
        self.origin: Callable[[int], Any] = _no_origin
        # The definitions of the names in it; any other value keeps none of it alive.
        self.heard = heard if payload[0] == NAMED else NONE_HEARD

    @property
    def is_moved_tensor(self) -> bool:
        """Whether it is one tensor of another process, whose bytes came through host memory beside the message."""
        return len(self.blobs) == 1 and is_tensor(self.payload) and self.origin is _no_origin and not self.on_device

    @property
    def on_device(self) -> bool:
        return not all(isinstance(blob, memoryview) for blob in self.blobs)


class Plain:  # noqa: B903 - the name says what the value is
    """A value that is a field of a message as it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _no_origin(index: int) -> Any:
    return None
