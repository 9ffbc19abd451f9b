"""Encoded values: a small skeleton and large buffers, which are copied only when their target is known.

The buffers of one value are packed into one *blob* (64-byte aligned), so that 200 tensors are one transfer. A buffer in
memory that other processes can read (`aiodaft.memory.empty`, `aiodaft.memory.register`) is a separate blob and is never
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol

from aiodaft.exceptions import BorrowError
from aiodaft_transport import Pullable
from aiodaft_transport.memory import address_of, copy_memory

# The blobs of a value: one of the host, one for each buffer that is apart, and one of each accelerator.

_ALIGNMENT: Final = 64
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


def digest_of(code: bytes | memoryview) -> bytes:
    import hashlib  # noqa: PLC0415 - slow, and most programs send no code

    return hashlib.sha256(code).digest()


class Source:
    __slots__ = ("address", "block", "device", "fill", "frozen", "keep", "lent", "nbytes", "origin", "version")

    def __init__(self, nbytes: int, address: int, keep: Any, device: int | None = None) -> None:
        self.nbytes = nbytes
        self.address = address
        self.device = device
        self.keep = keep
        # For memory that is not contiguous: writes the content to an address.
        self.fill: Callable[[int], None] | None = None
        # Gives the number of writes to a tensor, as torch counts them; None if torch does not.
        self.version: Callable[[], int | None] | None = None
        # Gives the object that the buffer was made from, while it lives and was not written to.
        self.origin: Callable[[], Any] | None = None
        # Nothing can change it: bytes, or memory of the encoder's own.
        self.frozen = False
        self.block: Pullable | None = None
        self.lent = False

    @property
    def is_apart(self) -> bool:
        return self.block is not None or (self.lent and self.device is not None)

    @classmethod
    def of(cls, buffer: Any) -> Source:
        view = memoryview(buffer)
        return cls(view.nbytes, address_of(view), view)

    def write_to(self, address: int) -> None:
        if self.fill is not None:
            self.fill(address)
        else:
            copy_memory(address, self.address, self.nbytes)


@dataclass(slots=True)
class Encoded:
    """A value, ready to travel.

    Attributes:
        payload: The skeleton; a few bytes if the skeleton itself is one of the sources.
        offsets: The offset of each source in the blob, or `APART`.
        slots: Refs that the receiver replaces by their values.
    """

    payload: bytes
    sources: list[Source] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0
    device_nbytes: dict[int, int] = field(default_factory=dict)
    slots: list[Any] = field(default_factory=list)
    refs: list[Any] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        return any(source.device is not None for source in self.sources)

    @property
    def size(self) -> int:
        return len(self.payload) + sum(source.nbytes for source in self.sources)

    @property
    def is_apart(self) -> bool:
        return any(source.is_apart for source in self.sources)

    @property
    def lent(self) -> bool:
        return any(source.lent for source in self.sources)

    @property
    def is_frozen(self) -> bool:
        return all(source.frozen or source.device is not None or source.is_apart for source in self.sources)

    def write_to(self, address: int) -> None:
        for source, offset in zip(self.sources, self.offsets, strict=True):
            if offset >= 0 and source.device is None:
                source.write_to(address + offset)

    def packed(self) -> bytes | None:
        if not self.nbytes:
            return None
        blob = bytearray(self.nbytes)
        self.write_to(address_of(blob))
        return bytes(blob)

    def versions(self) -> list[int | None]:
        return [source.version() if source.version is not None else None for source in self.sources]

    def check_unchanged(self, before: list[int | None]) -> None:
        if self.versions() != before:
            raise BorrowError(
                "a tensor was written to while aiodaft was reading it: pass or return x.clone(), "
                "or wait for `await ref.ready()` before you write to it"
            )
