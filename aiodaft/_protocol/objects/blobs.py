"""The layout of a value's buffers in blobs. Pure.

The blobs of a value are: one of the host, one for each buffer that is apart, and one of each accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final, Protocol

_ALIGNMENT: Final = 64
# The offset of a buffer that is a blob of its own.
APART: Final = -1


class Buffer(Protocol):
    """One buffer of a value, on an accelerator if `device` is not None."""

    nbytes: int
    device: int | None

    @property
    def is_apart(self) -> bool: ...


def lay_out(buffers: Iterable[Buffer]) -> tuple[list[int], int, dict[int, int]]:
    """Offsets of the buffers in their blobs, and the sizes of these: the host's, and that of each accelerator."""
    offsets: list[int] = []
    ends: dict[int | None, int] = {}
    for buffer in buffers:
        if buffer.is_apart:
            offsets.append(APART)
            continue
        offsets.append(-(-ends.get(buffer.device, 0) // _ALIGNMENT) * _ALIGNMENT)
        ends[buffer.device] = offsets[-1] + buffer.nbytes
    return offsets, ends.pop(None, 0), {device: end for device, end in ends.items() if device is not None}


def blob_table(buffers: Sequence[Buffer], offsets: list[int], nbytes: int) -> list[list[int]]:
    """Blob, offset and size of each buffer, if the blob of the host has `nbytes`."""
    numbers = count(1 if nbytes else 0)
    apart = [next(numbers) if buffer.is_apart else 0 for buffer in buffers]
    of_devices: dict[int, int] = {}
    table: list[list[int]] = []
    for buffer, offset, blob in zip(buffers, offsets, apart, strict=True):
        if not buffer.is_apart and buffer.device is not None:
            if buffer.device not in of_devices:
                of_devices[buffer.device] = next(numbers)
            blob = of_devices[buffer.device]
        table.append([blob, max(offset, 0), buffer.nbytes])
    return table
