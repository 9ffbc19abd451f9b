"""A peer with device memory, and one transfer from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiodaft_transport.abc import Control
from aiodaft_transport.cuda.device import DeviceSegment, Driver, Event, Land, Landing, Span
from aiodaft_transport.exceptions import DeviceError
from aiodaft_transport.memory.pull import BasePull
from aiodaft_transport.peers import SegmentRemote


class RemoteSegment:
    """A segment of a peer, and its addresses in this process."""

    __slots__ = ("addresses", "gone", "handle", "identity", "size", "users")

    def __init__(self, size: int, identity: bytes, handle: bytes) -> None:
        self.size = size
        self.identity = identity
        self.handle = handle
        # Its address for each device of this process.
        self.addresses: dict[int, int] = {}
        self.users = 0
        # Called once it is closed; set when it is not used any more.
        self.gone: Callable[[], object] | None = None

    def opened(self, driver: Driver, device: int) -> int:
        """Its address for work of a device; opens it if needed, in the helper thread."""
        if device not in self.addresses:
            self.addresses[device] = driver.open(device, self.handle)
        return self.addresses[device]

    def shut(self, driver: Driver) -> None:
        """Close it on all devices. In the helper thread, or after that has ended."""
        while self.addresses:
            # A device that failed keeps it open until the process ends.
            with suppress(DeviceError):
                driver.shut(*self.addresses.popitem())


class Remote(SegmentRemote[RemoteSegment]):
    """A peer: also the transfers from it."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.pulls: set[Pull] = set()


class Pull(BasePull[Any]):
    """One transfer. Owns its memory until it is over.

    Attributes:
        queued: The owner of the memory, once the device is told to copy: work behind that copy sees the bytes.
    """

    def __init__(
        self, remote: Remote, segment: RemoteSegment | DeviceSegment, offset: int, nbytes: int, grant: int
    ) -> None:
        super().__init__()
        self.queued: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.remote = remote
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.grant = grant
        self.landing: Landing | None = None
        self.event: Event | None = None

    def begin(self, driver: Driver, land: Land) -> None:
        """Have the device copy; in the helper thread, if the segment is not open for it."""
        landing = self.landing = land(self.segment.identity, self.nbytes)
        source = self.segment.opened(driver, landing.device) + self.offset
        self.event = driver.copy(landing.device, [Span(landing.address, source, self.nbytes)], landing.stream)

    def set_queued(self) -> None:
        assert self.landing is not None
        if not self.queued.done():
            self.queued.set_result(self.landing.owner)

    def settle(self, error: Exception | None) -> None:
        """Give the waiters their result or error, if they still wait."""
        if error is not None:
            self.set_error(error)
            if not self.queued.done():
                self.queued.set_exception(error)
                # As of `done`, the waiter may be gone.
                self.queued.exception()
        elif not self.done.done():
            assert self.landing is not None
            self.done.set_result(self.landing.owner)
