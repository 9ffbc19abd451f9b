"""A peer with device memory, and one transfer from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiodaft_transport.abc import Control
from aiodaft_transport.cuda.device import DeviceSegment, Driver, Event, Land, Landing, Span
from aiodaft_transport.memory.pull import BasePull
from aiodaft_transport.peers import SegmentRemote


class RemoteSegment:
    """A segment of a peer, and its addresses in this process."""

    __slots__ = ("addresses", "gone", "handle", "identity", "size", "users")

    def __init__(self, size: int, identity: bytes, handle: bytes) -> None:
        self.size = size
        self.identity = identity
        self.handle = handle
        # Its address for each device of this process. Belongs to the helper thread.
        self.addresses: dict[int, int] = {}
        self.users = 0
        # Called once it is closed; set when it is not used any more.
        self.gone: Callable[[], object] | None = None

    def opened(self, driver: Driver, device: int) -> int:
        """Its address for work of a device; opens it if needed. In the helper thread."""
        if device not in self.addresses:
            self.addresses[device] = driver.open(device, self.handle)
        return self.addresses[device]

    def shut(self, driver: Driver) -> None:
        """Close it on all devices. In the helper thread, or after that has ended."""
        while self.addresses:
            driver.shut(*self.addresses.popitem())


class Remote(SegmentRemote[RemoteSegment]):
    """A peer: also the transfers from it."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.pulls: set[Pull] = set()


class Pull(BasePull[Any]):
    """One transfer. Owns its memory until it is over."""

    def __init__(
        self, remote: Remote, segment: RemoteSegment | DeviceSegment, offset: int, nbytes: int, grant: int
    ) -> None:
        super().__init__()
        self.remote = remote
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.grant = grant
        self.landing: Landing | None = None
        self.event: Event | None = None

    def begin(self, driver: Driver, land: Land) -> Event:
        """Have the device copy; in the helper thread, because opening memory and making a context take long."""
        landing = self.landing = land(self.segment.identity, self.nbytes)
        source = self.segment.opened(driver, landing.device) + self.offset
        driver.copy(landing.device, [Span(landing.address, source, self.nbytes)], landing.stream)
        self.event = driver.record(landing.device, landing.stream)
        return self.event

    def settle(self, error: Exception | None) -> None:
        """Give the waiter its result or error, if it still waits."""
        if error is not None:
            self.set_error(error)
        elif not self.done.done():
            assert self.landing is not None
            self.done.set_result(self.landing.owner)
