"""What a process knows of a peer whose device memory it reads, and one such transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from aiodaft_transport.abc import Control
from aiodaft_transport.cuda.device import DeviceBlock, DeviceSegment, Driver, Event, Land, Landing, Span


class RemoteSegment:
    """A segment of a peer, and where it is open."""

    __slots__ = ("addresses", "gone", "handle", "identity", "size", "users")

    def __init__(self, size: int, identity: bytes, handle: bytes) -> None:
        self.size = size
        self.identity = identity
        self.handle = handle
        # By device of this process. Belongs to the helper thread.
        self.addresses: dict[int, int] = {}
        self.users = 0
        # What to say once it is closed; set when nobody wants it any more.
        self.gone: Callable[[], object] | None = None

    def opened(self, driver: Driver, device: int) -> int:
        """Where it is for work of a device; opened if it was not. In the helper thread."""
        if device not in self.addresses:
            self.addresses[device] = driver.open(device, self.handle)
        return self.addresses[device]

    def shut(self, driver: Driver) -> None:
        """Close it everywhere. In the helper thread, or when that has ended."""
        while self.addresses:
            driver.shut(*self.addresses.popitem())


class OwnSegment:
    """A segment of this very process, as one of a peer."""

    __slots__ = ("_segment", "identity", "users")

    def __init__(self, segment: DeviceSegment, identities: Sequence[bytes]) -> None:
        self._segment = segment
        self.identity = identities[segment.device]
        self.users = 0

    def opened(self, driver: Driver, device: int) -> int:
        """Where it is."""
        return self._segment.address


class Remote:
    """A peer: what of our memory it may read, and what of its memory is known here."""

    def __init__(self, control: Control) -> None:
        self.control = control
        # Our segments that it knows.
        self.told: set[int] = set()
        self.granted: dict[int, DeviceBlock] = {}
        self.segments: dict[int, RemoteSegment] = {}
        self.pulls: set[Pull] = set()


class Pull:
    """One transfer: owns what it is about until the device is done with it."""

    def __init__(
        self, remote: Remote, segment: RemoteSegment | OwnSegment, offset: int, nbytes: int, grant: int
    ) -> None:
        self.remote = remote
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.grant = grant
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.landing: Landing | None = None
        self.event: Event | None = None
        self._over = False
        self._ended: asyncio.Future[None] | None = None

    def begin(self, driver: Driver, land: Land) -> Event:
        """Have the device copy; in the helper thread, because opening memory and making a context take long."""
        landing = self.landing = land(self.segment.identity, self.nbytes)
        source = self.segment.opened(driver, landing.device) + self.offset
        driver.copy(landing.device, [Span(landing.address, source, self.nbytes)], landing.stream)
        self.event = driver.record(landing.device, landing.stream)
        return self.event

    def settle(self, error: Exception | None) -> None:
        """Tell the waiter, unless it knows better or is gone."""
        if self.done.done():
            return
        if error is None:
            assert self.landing is not None
            self.done.set_result(self.landing.owner)
        else:
            self.done.set_exception(error)
            # Whoever waited may be gone.
            self.done.exception()

    def end(self) -> None:
        """The device is done with it, or the process ends."""
        self._over = True
        if self._ended is not None:
            self._ended.set_result(None)

    async def wait_over(self) -> None:
        """Wait until the device is done with it, also if the waiter was told of an error before.

        Cancellation: does not end it, because a device cannot be stopped either. Whoever calls this because of a
        cancellation passes that one on.
        """
        while not self._over:
            if self._ended is None:
                self._ended = asyncio.get_running_loop().create_future()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._ended])
