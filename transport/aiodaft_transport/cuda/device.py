"""Memory of accelerators: the interfaces of their driver and of its host, pools of memory to export, and events.

A *device* is a number in this process, and an *identity* everywhere: processes see different devices, in a different
order. A *stream* is a queue of work of a device, by the number the driver gave it; 0 is the default one.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from aiodaft_transport.abc import BasePull, Control, Host, SegmentRemote
from aiodaft_transport.exceptions import DeviceError, OutOfDeviceMemory, TransportError
from aiodaft_transport.memory import DEFAULT_KEEP, BlockPool, PooledBlock, PooledSegment

T = TypeVar("T")

IDENTITY_SIZE: Final = 16
# One part in so many of a device's memory stays in its pool for the next values: of 80 GiB, four values of 1 GiB.
_KEPT_PART: Final = 16


class Span(NamedTuple):
    target: int
    source: int
    nbytes: int


class Event(NamedTuple):
    device: int
    number: int


class Export(NamedTuple):
    """An allocation that other processes can open. No other one of its process ever has its number."""

    number: int
    handle: bytes
    address: int
    size: int


class Driver(Protocol):
    """Operations of a kind of accelerator, safe in any thread. Few wait for a device or take long; those say so."""

    @property
    def identities(self) -> Sequence[bytes]: ...

    def apart(self) -> AbstractContextManager[object]:
        """Work of this thread with other libraries ends no capture of a graph in another thread meanwhile."""
        ...

    def memory(self, device: int) -> int: ...

    def allocate(self, device: int, nbytes: int) -> int:
        """May wait for the device.

        Raises:
            OutOfDeviceMemory: There is no memory left.
        """
        ...

    def free(self, device: int, address: int) -> None: ...

    def export(self, device: int, address: int) -> Export:
        """The allocation that an address is in.

        Raises:
            Unreachable: Other processes cannot open it; the message says why.
        """
        ...

    def open(self, device: int, handle: bytes) -> int:
        """The address of another process's allocation, for work of `device`. May take long.

        Raises:
            Unreachable: The device cannot reach that memory.
        """
        ...

    def shut(self, device: int, address: int) -> None: ...

    def stream_apart(self, device: int) -> int:
        """A stream of this driver alone, which waits for no other one."""
        ...

    def copy(self, device: int, spans: Sequence[Span], stream: int) -> Event: ...

    def is_idle(self, device: int, stream: int) -> bool:
        """Whether a stream has no work, as far as that can be told without a wait. A failed device is not idle."""
        ...

    def record(self, device: int, stream: int) -> Event: ...

    def happened(self, event: Event) -> bool:
        """Raises DeviceError: the device failed."""
        ...

    def wait(self, event: Event) -> None: ...

    def forget(self, event: Event) -> None: ...

    def close(self) -> None: ...


class DeviceHost(Host, Protocol):
    def in_thread(self, job: Callable[[], T], /) -> Awaitable[T]:
        """Run `job` in the process's helper thread; it runs to its end, also if the waiter is cancelled."""
        ...


class Landing(NamedTuple):
    """Memory to fetch into, which lives as long as its owner."""

    owner: Any
    device: int
    address: int
    nbytes: int
    stream: int


# Provides memory for bytes from the device with an identity; called in the helper thread. Raises Unreachable if this
# process has no device.
Land: TypeAlias = Callable[[bytes, int], Landing]


class DeviceSegment(PooledSegment):
    __slots__ = ("device", "handle", "identity", "is_lent", "rests", "users", "waiting")

    def __init__(self, number: int, export: Export, capacity: int, device: int, identity: bytes) -> None:
        super().__init__(number, export.size, capacity, export.address)
        self.handle = export.handle
        self.device = device
        self.identity = identity
        self.is_lent = False
        # Not used since the pool looked the last time.
        self.rests = False
        self.users = 0
        self.waiting: set[str] = set()

    def opened(self, driver: Driver, device: int) -> int:
        return self.address

    def close(self) -> None:
        """The transport frees it once no peer has it open."""


class DeviceBlock(PooledBlock[DeviceSegment]):
    """A value, or part of one, on one device."""

    __slots__ = ("_waiting", "error", "filled", "keep", "owner")

    def __init__(self, pool: BlockPool[DeviceSegment], segment: DeviceSegment, offset: int, nbytes: int) -> None:
        super().__init__(pool, segment, offset, nbytes)
        # The device has done the earlier work: peers may read the block.
        self.filled = False
        self.error: TransportError | None = None
        # The source of the copy, kept alive until that is made.
        self.keep: Any = None
        # The owner of lent memory, kept alive until no peer reads it any more.
        self.owner: Any = None
        self._waiting: list[Callable[[], object]] = []

    @property
    def settled(self) -> bool:
        return self.filled or self.error is not None

    def fill(self, keep: Any) -> None:
        """The block is not reused before the end of the device's write, even if it is released."""
        self.keep = keep
        self.take_grant()

    def on_filled(self, callback: Callable[[], object]) -> None:
        if self.settled:
            callback()
        else:
            self._waiting.append(callback)

    def fill_ended(self, error: TransportError | None) -> None:
        self.keep = None
        self.error = error
        self.filled = error is None
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()
        if error is None:
            # After an error, the device may still write to it.
            self.return_grant()


class DevicePool(BlockPool[DeviceSegment]):
    def __init__(
        self,
        driver: Driver,
        device: int,
        next_number: Callable[[], int],
        made: dict[int, DeviceSegment],
        on_segment_closed: Callable[[int], object],
    ) -> None:
        # Free memory is memory that nobody else has: more of a large device's is kept, and only for a while.
        keep = max(DEFAULT_KEEP, driver.memory(device) // _KEPT_PART)
        super().__init__(keep=keep, next_number=next_number, on_segment_closed=on_segment_closed)
        self.keep_resting = DEFAULT_KEEP
        self._driver = driver
        self._device = device
        self._made = made
        self._lent: dict[int, DeviceSegment] = {}

    def allocate(self, nbytes: int) -> DeviceBlock:
        with self.lock:
            segment, offset = self._take(nbytes)
            segment.rests = False
            return DeviceBlock(self, segment, offset, nbytes)

    def lend(self, address: int, nbytes: int, owner: Any) -> DeviceBlock:
        export = self._driver.export(self._device, address)
        with self.lock:
            segment = self._lent.get(export.number)
            if segment is None:
                segment = self._lent[export.number] = self._segment(self.next_number(), export, export.size)
                segment.is_lent = True
            segment.live += 1
            segment.rests = False
            block = DeviceBlock(self, segment, address - export.address, nbytes)
            block.owner = owner
            return block

    def forget_idle(self) -> bool:
        """Give back memory that was not used since the last time; whether there is more to look after.

        Peers are to close the user's memory, which they keep open in between, because opening it takes long: while a
        peer has it open, the device cannot use memory that the user has freed. Free memory of the pool beyond
        `keep_resting` goes back to the device.
        """
        with self.lock:
            own = self._segments()
            surplus = sum(segment.size for segment in own if not segment.live) - self.keep_resting
            for number, segment in list(self._lent.items()):
                if segment.rests and not segment.live:
                    del self._lent[number]
                    self._drop(segment)
                segment.rests = not segment.live
            for segment in own:
                if segment.rests and not segment.live and surplus > 0:
                    surplus -= segment.size
                    self._drop(segment)
                segment.rests = not segment.live
            return bool(self._lent) or sum(segment.size for segment in self._segments()) > self.keep_resting

    def _own_segment(self, nbytes: int) -> DeviceSegment:
        try:
            return super()._own_segment(nbytes)
        except OutOfDeviceMemory:
            # One that is much too large serves as well.
            larger = [one for one in self._own if one.size >= nbytes and not (one.live or one.retired)]
            if not larger:
                raise
            return min(larger, key=lambda segment: segment.size)

    def _make_segment(self, number: int, size: int, capacity: int) -> DeviceSegment:
        address = self._driver.allocate(self._device, size)
        try:
            export = self._driver.export(self._device, address)
        except BaseException:
            self._driver.free(self._device, address)
            raise
        return self._segment(number, export, capacity)

    def _segment(self, number: int, export: Export, capacity: int) -> DeviceSegment:
        segment = DeviceSegment(number, export, capacity, self._device, self._driver.identities[self._device])
        self._made[number] = segment
        return segment

    def reuse_if_idle(self, block: PooledBlock[DeviceSegment]) -> None:
        if block.segment.is_lent:
            if block.released and not block.grants:
                block.segment.live -= 1
                cast("DeviceBlock", block).owner = None
        else:
            super().reuse_if_idle(block)


class RemoteSegment:
    __slots__ = ("addresses", "gone", "handle", "identity", "size", "users")

    def __init__(self, size: int, identity: bytes, handle: bytes) -> None:
        self.size = size
        self.identity = identity
        self.handle = handle
        self.addresses: dict[int, int] = {}
        self.users = 0
        self.gone: Callable[[], object] | None = None

    def opened(self, driver: Driver, device: int) -> int:
        """Opens it if needed, in the helper thread."""
        if device not in self.addresses:
            self.addresses[device] = driver.open(device, self.handle)
        return self.addresses[device]

    def shut(self, driver: Driver) -> None:
        """In the helper thread, or after that has ended."""
        while self.addresses:
            # A device that failed keeps it open until the process ends.
            with suppress(DeviceError):
                driver.shut(*self.addresses.popitem())


class Remote(SegmentRemote[RemoteSegment]):
    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.pulls: set[Pull] = set()


class Pull(BasePull[Any]):
    """One transfer. Owns its memory until it is over.

    Attributes:
        queued: The owner of the memory: work behind the copy that the device was told to make sees the bytes.
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
        landing = self.landing = land(self.segment.identity, self.nbytes)
        source = self.segment.opened(driver, landing.device) + self.offset
        self.event = driver.copy(landing.device, [Span(landing.address, source, self.nbytes)], landing.stream)

    def set_queued(self) -> None:
        assert self.landing is not None
        if not self.queued.done():
            self.queued.set_result(self.landing.owner)

    def settle(self, error: Exception | None) -> None:
        if error is not None:
            self.set_error(error)
            if not self.queued.done():
                self.queued.set_exception(error)
                # As of `done`, the waiter may be gone.
                self.queued.exception()
        elif not self.done.done():
            assert self.landing is not None
            self.done.set_result(self.landing.owner)


# Small copies end within so many seconds; each turn of the loop asks.
_EAGER: Final = 0.0001
# Later, the time to the next question is this part of the time since the last event was added, up to a limit: the delay
# of an event is a small part of its time, and long events cost little.
_PART: Final = 0.1
_LONGEST: Final = 0.001

_CLOCK_MONOTONIC: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)

Happened: TypeAlias = Callable[[TransportError | None], object]


class EventWatch:
    """Reports events of a device on the running loop.

    A device has nothing that a loop could wait on, short of a function that it calls in the middle of the user's
    stream, and never if it has failed. So it is asked, which never waits.
    """

    def __init__(self, driver: Callable[[], Driver]) -> None:
        self._driver = driver
        self._awaited: dict[Event, Happened] = {}
        self._since = 0.0
        self._turn_soon: asyncio.Handle | None = None
        self._alarm: _Alarm | None = None
        self.questions = 0

    @property
    def is_asking(self) -> bool:
        return self._turn_soon is not None or (self._alarm is not None and self._alarm.is_set)

    def add(self, event: Event, on_happened: Happened) -> None:
        """At once if the event has already happened."""
        self._awaited[event] = on_happened
        self._ask(event)
        if event in self._awaited:
            self._since = asyncio.get_running_loop().time()
            self._ask_again()

    def finish(self) -> None:
        self._stop()
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        for event in list(self._awaited):
            self._driver().wait(event)
            self._ask(event)

    def _stop(self) -> None:
        if self._turn_soon is not None:
            self._turn_soon.cancel()
            self._turn_soon = None
        if self._alarm is not None and self._alarm.is_set:
            self._alarm.set(0)

    def _turn(self) -> None:
        self._turn_soon = None
        for event in list(self._awaited):
            self._ask(event)
        if self._awaited:
            self._ask_again()
        else:
            self._stop()

    def _ask_again(self) -> None:
        loop = asyncio.get_running_loop()
        waited = loop.time() - self._since
        if waited < _EAGER:
            if self._turn_soon is None:
                self._turn_soon = loop.call_soon(self._turn)
            return
        if self._alarm is None:
            self._alarm = _Alarm(loop, self._turn)
        self._alarm.set(min(waited * _PART, _LONGEST))

    def _ask(self, event: Event) -> None:
        self.questions += 1
        error: TransportError | None = None
        try:
            if not self._driver().happened(event):
                return
        except TransportError as caught:
            error = caught
        on_happened = self._awaited.pop(event)
        with suppress(TransportError):
            # A device that was reset has no events.
            self._driver().forget(event)
        on_happened(error)


class _Time(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "seconds", "nanoseconds")]


class _Alarm:
    """A timer of a loop that is finer than the loop's own, which count milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self.is_set = False
        self._fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timer for the events of a device")
        loop.add_reader(self._fd, self._rang)

    def set(self, seconds: float) -> None:
        """Call back once after this time, and not at an earlier set time; never if it is 0."""
        self.is_set = seconds > 0
        time = _Time(seconds=int(seconds), nanoseconds=int(seconds % 1 * 1e9))
        _libc.timerfd_settime(self._fd, 0, ctypes.byref(time), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _rang(self) -> None:
        # It may have been set anew meanwhile.
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
            self.is_set = False
            self._callback()
