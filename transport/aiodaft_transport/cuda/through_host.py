"""Device memory for transports that send bytes of host memory: each part is copied when a peer pulls it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiodaft_transport.cuda.device import DeviceBlock, Driver, Span
from aiodaft_transport.memory.block_pool import Unmapped


class ThroughHost(Unmapped):
    """A filled block of a device. Its grants are grants of that block."""

    def __init__(
        self, block: DeviceBlock, driver: Driver, in_thread: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> None:
        super().__init__(block.nbytes)
        self._block = block
        self._driver = driver
        self._in_thread = in_thread

    def take_grant(self) -> None:
        self._block.take_grant()

    def return_grant(self) -> None:
        self._block.return_grant()

    async def read_into(self, address: int, start: int, nbytes: int) -> None:
        await self._in_thread(lambda: self._copy(Span(address, self._block.address + start, nbytes)))

    def _copy(self, span: Span) -> None:
        driver, device = self._driver, self._block.segment.device
        # The block is filled already: the copy need not wait for computations of the device.
        event = driver.copy(device, [span], driver.stream_apart(device))
        try:
            driver.wait(event)
            driver.happened(event)
        finally:
            driver.forget(event)
