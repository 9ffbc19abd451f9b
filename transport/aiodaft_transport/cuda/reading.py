"""Memory of a peer that this process reads where it lies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from aiodaft_transport.cuda.device import DeviceSegment, Driver
from aiodaft_transport.cuda.pull import RemoteSegment


class Reading:
    """Granted bytes, for work of the streams named by `used_by`: they stay there until this object is garbage.

    Its user must not write to them. Then each of these streams does its work of that time, and the grant is returned.
    """

    __slots__ = ("_on_dropped", "_segment", "_streams", "address", "device", "nbytes", "offset")

    def __init__(
        self,
        segment: RemoteSegment | DeviceSegment,
        device: int,
        offset: int,
        nbytes: int,
        on_dropped: Callable[[Collection[int]], object],
    ) -> None:
        self._segment = segment
        self._streams: set[int] = set()
        # Called in any thread, with the streams.
        self._on_dropped = on_dropped
        self.device = device
        self.offset = offset
        self.nbytes = nbytes
        self.address = 0

    def open(self, driver: Driver) -> None:
        """Find its address. In the helper thread, because opening memory takes long."""
        self.address = self._segment.opened(driver, self.device) + self.offset

    def used_by(self, stream: int) -> None:
        self._streams.add(stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes for libraries of tensors, which keep this object alive."""
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None}

    def __del__(self) -> None:
        self._on_dropped(self._streams)
