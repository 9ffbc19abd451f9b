"""CUDA: device memory between processes of one host, by IPC handles, without a copy in host memory.

The producer copies a value into memory that it exports, on the stream that made the value, so later work of that stream
does not change the copy. When the device has made the copy, the producer grants the block. The consumer opens the
segment, once, and copies the block into its own memory on its own stream; then it returns the grant. So no stream waits
for another process, which may die. A consumer that only reads may read the block where it lies instead, and returns the
grant when it is done.

Measured on an H200 with driver 580: memory that is open here outlives the process that exported it, and a stream that
waits for an event of a process that was killed waits for ever. So events of other processes are not used.

The producer frees a segment when every peer has closed it or is gone, as CUDA demands.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, cast

from aiodaft_transport.abc import GONE, RETURN, SEGMENT, Control, Grant, SegmentTransport, size_of
from aiodaft_transport.cuda.device import (
    IDENTITY_SIZE,
    DeviceBlock,
    DeviceHost,
    DevicePool,
    DeviceSegment,
    Driver,
    Event,
    EventWatch,
    Land,
    Landing,
    Pull,
    Remote,
    RemoteSegment,
    Span,
)
from aiodaft_transport.exceptions import DeviceError, GrantError, PeerGone, TransportError
from aiodaft_transport.memory import Unmapped


class ThroughHost(Unmapped):
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


class Reading:
    """Granted bytes, for work of the streams named by `used_by`, which must not write to them. When this object is
    garbage, and each of these streams has done its work of that time, the grant is returned.
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
        self._on_dropped = on_dropped
        self.device = device
        self.offset = offset
        self.nbytes = nbytes
        self.address = 0

    def open(self, driver: Driver) -> None:
        """In the helper thread, because opening memory takes long."""
        self.address = self._segment.opened(driver, self.device) + self.offset

    def used_by(self, stream: int) -> None:
        self._streams.add(stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For libraries of tensors, which keep this object alive."""
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None}

    def __del__(self) -> None:
        self._on_dropped(self._streams)


# A further note. The body of SEGMENT is the identity of the device and the handle.
_CLOSED: Final = 4  # id: the sender has closed a segment of the receiver

_DEFAULT_STREAM: Final = 0

# See `DevicePool.forget_idle`.
_REST: Final = 1.0


class CudaTransport(SegmentTransport[DeviceBlock, Remote]):
    """Device memory between processes of one host. `register` and `block_at` do nothing: `lend` exports memory."""

    name: ClassVar[str] = "cuda"

    def __init__(self, host: DeviceHost, open_driver: Callable[[], Driver], land: Land, *, local: str) -> None:
        super().__init__(host)
        self._in_thread = host.in_thread
        self._open_driver = open_driver
        self._driver: Driver | None = None
        # Reentrant: a garbage collection meanwhile may free memory.
        self._lock = threading.RLock()
        self._land = land
        self._local = local
        self.watch = EventWatch(lambda: self.driver)
        self._next_segment = itertools.count(1).__next__
        self._pools: dict[int, DevicePool] = {}
        self._segments: dict[int, DeviceSegment] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._foreign: set[RemoteSegment] = set()

    @property
    def driver(self) -> Driver:
        """Opened at the first use, because that takes long.

        Raises:
            Unreachable: This process has no device.
        """
        with self._lock:
            if self._driver is None:
                self._driver = self._open_driver()
            return self._driver

    @property
    def segments(self) -> int:
        return len(self._segments)

    def live_blocks(self) -> int:
        return sum(pool.live_blocks() for pool in self.pools())

    def pools(self) -> Sequence[DevicePool]:
        return list(self._pools.values())

    def pool(self, device: int) -> DevicePool:
        known = self._pools.get(device)
        if known is not None:
            return known
        made = DevicePool(self.driver, device, self._next_segment, self._segments, self._segment_closed)
        # Atomic: two threads may ask at the same time.
        return self._pools.setdefault(device, made)

    def capture(self, device: int, spans: Sequence[Span], nbytes: int, stream: int, keep: Any) -> DeviceBlock:
        """Queue a copy into a new block, behind the earlier work of a stream. Safe in any thread; does not wait.

        Args:
            spans: Targets are offsets in the block.
            stream: It makes the content, and may change it afterwards.
            keep: Kept alive until the copy is made.

        Raises:
            DeviceError: There is no memory left, or the device failed.
        """
        block = self.pool(device).allocate(nbytes)
        placed = [Span(block.address + target, source, size) for target, source, size in spans]
        self._fill(block, self.driver.copy(device, placed, stream), keep)
        return block

    def lend(self, device: int, address: int, nbytes: int, stream: int, keep: Any) -> DeviceBlock:
        """Lend memory of the user as a block, filled when a stream has done its present work. Safe in any thread.

        Peers that get a grant can read the whole allocation that the memory is part of.

        Raises:
            Unreachable: The memory cannot be exported.
        """
        block = self.pool(device).lend(address, nbytes, keep)
        if self.driver.is_idle(device, stream):
            # An event would cost a turn of this process on the device.
            block.filled = True
            self._host.call_soon(self._look_later)
            return block
        try:
            event = self.driver.record(device, stream)
        except BaseException:
            block.release()
            raise
        self._fill(block, event, keep)
        return block

    def _fill(self, block: DeviceBlock, event: Event, keep: Any) -> None:
        block.fill(keep)
        self._host.call_soon(lambda: self._filling(block, event))

    def _filling(self, block: DeviceBlock, event: Event) -> None:
        self.watch.add(event, block.fill_ended)
        self._look_later()

    def _look_later(self) -> None:
        if self._looking is None and not self._closed:
            self._looking = asyncio.get_running_loop().call_later(_REST, self._forget_idle)

    def _forget_idle(self) -> None:
        self._looking = None
        left = [pool.forget_idle() for pool in self.pools()]
        if any(left):
            self._look_later()

    def grant(self, block: DeviceBlock, control: Control) -> Grant:
        _check_filled(block)
        return super().grant(block, control)

    def through_host(self, block: DeviceBlock) -> ThroughHost:
        _check_filled(block)
        return ThroughHost(block, self.driver, self._in_thread)

    async def fetch(self, grant: Grant, control: Control) -> Any:
        """Bring the granted bytes into memory that `land` provides, and return its owner.

        The grant is returned when the device has copied, also if the fetch is cancelled or fails.

        Raises:
            Unreachable: This process has no device, or it cannot reach that memory.
            PeerGone: The peer was lost during the fetch.
            DeviceError: The device failed, or has no memory left.
            GrantError: There is no such memory.
        """
        return await self._pull(grant, control, self._land).done

    async def bring(self, grant: Grant, control: Control) -> Any:
        """As `fetch`, but returns as soon as the copy is queued on the stream of the memory.

        If the producer dies from then on, or the waiter is cancelled, that copy is still made.
        """
        return await self._pull(grant, control, self._land).queued

    def bring_now(self, grant: Grant, control: Control) -> Any:
        """At once; None, and nothing has happened, if that could take long or fails."""
        if not self._is_open(grant, control):
            return None
        pull = self._new_pull(grant, control)
        try:
            pull.begin(self.driver, self._land)
        except Exception:  # noqa: BLE001 - `bring` raises it again
            self._end(pull)
            return None
        owner = cast(Landing, pull.landing).owner
        self._begun(pull)
        return owner

    async def read(self, grant: Grant, control: Control) -> Any:
        """The granted bytes where they lie, as a `Reading`; as `bring` if they are on no device of this process."""
        with self._declining(grant, control):
            reading = self._reading(grant, control)
        if reading is None:
            return await self.bring(grant, control)
        # If this is cancelled, or fails, the reading is dropped: the effects of that come after this job.
        await self._in_thread(lambda: reading.open(self.driver))
        return reading

    def read_now(self, grant: Grant, control: Control) -> Any:
        """At once; None, and nothing has happened, if that could take long or fails."""
        if not self._is_open(grant, control):
            return None
        reading = self._reading(grant, control)
        if reading is None:
            return self.bring_now(grant, control)
        reading.open(self.driver)
        return reading

    async def fetch_into(self, grant: Grant, control: Control, target: Landing) -> None:
        """Bring the granted bytes into memory of the caller, behind the earlier work of its stream.

        See `Transport.fetch_into`: when it returns or raises, the copy is done, unless this process ends.

        Raises:
            ValueError: The memory is of another size.
            Unreachable: The device of the memory cannot reach the granted block; the device of `device_of` can.
            PeerGone, DeviceError, GrantError: As `fetch` does.
        """
        size = size_of(grant)
        with self._declining(grant, control, ValueError):
            if target.nbytes != size:
                raise ValueError(f"{size} bytes cannot be fetched into {target.nbytes} bytes of device memory")
        pull = self._pull(grant, control, lambda source, nbytes: target)
        try:
            await pull.done
        except BaseException:
            await pull.wait_over()
            raise

    def device_of(self, grant: Grant, control: Control) -> int | None:
        identity, known = self.source_of(grant, control)[1].identity, self.driver.identities
        return known.index(identity) if identity in known else None

    def close(self) -> None:
        """The helper thread has ended before. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        for pull in [pull for remote in self.remotes.values() for pull in remote.pulls]:
            if pull.event is not None:
                self.driver.wait(pull.event)
        self.watch.finish()
        self._lose_all()
        for segment in self._foreign:
            if segment.addresses:
                segment.shut(self.driver)
        self._foreign.clear()
        for pool in self._pools.values():
            pool.close()
        while self._segments:
            self._free(self._segments.popitem()[1])
        if self._driver is not None:
            self._driver.close()

    def _meet(self, control: Control) -> Remote:
        return Remote(control)

    def _offer(self, block: DeviceBlock, remote: Remote) -> tuple[int, int]:
        if remote.control.peer == self._local:
            return block.segment.id, block.offset
        return super()._offer(block, remote)

    def _tell(self, segment: DeviceSegment, remote: Remote) -> None:
        self._send(remote, SEGMENT, segment.id, segment.size, segment.identity + segment.handle)

    def _noted(self, remote: Remote, kind: int, number: int, size: int, body: bytes, fds: list[int]) -> bool:
        own, peer = self._segments.get(number), remote.control.peer
        if fds:
            return False
        if kind == SEGMENT and len(body) > IDENTITY_SIZE and number not in remote.segments:
            segment = remote.segments[number] = RemoteSegment(size, body[:IDENTITY_SIZE], body[IDENTITY_SIZE:])
            self._foreign.add(segment)
        elif kind == GONE and number in remote.segments:
            self._give_up(remote.segments.pop(number), lambda: self._send(remote, _CLOSED, number))
        elif kind == _CLOSED and own is not None and peer in own.waiting:
            self._closed_at(own, peer)
        else:
            return kind == RETURN and remote.take_back(number)
        return True

    def _part(self, remote: Remote) -> None:
        peer = remote.control.peer
        for pull in remote.pulls:
            # The device may still copy; the pull owns the memory until then.
            pull.settle(PeerGone(f"{peer} is gone"))
        for segment in list(self._segments.values()):
            if peer in segment.waiting:
                self._closed_at(segment, peer)
        while remote.segments:
            self._give_up(remote.segments.popitem()[1], lambda: None)

    def _readable(self, remote: Remote) -> Mapping[int, RemoteSegment | DeviceSegment]:
        return self._segments if remote.control.peer == self._local else remote.segments

    def _pull(self, grant: Grant, control: Control, land: Land) -> Pull:
        pull = self._new_pull(grant, control)
        self._host.create_task(self._begin(pull, land), name=f"copy from the device memory of {control.peer}")
        return pull

    def _is_open(self, grant: Grant, control: Control) -> bool:
        try:
            segment = self.source_of(grant, control)[1]
        except GrantError:
            return False
        # A process without a device has opened nothing, and its driver cannot be opened.
        return isinstance(segment, DeviceSegment) or (
            bool(segment.addresses) and (self.device_of(grant, control) or 0) in segment.addresses
        )

    def _new_pull(self, grant: Grant, control: Control) -> Pull:
        _, offset, nbytes, number = cast(tuple[int, int, int, int], grant)
        remote, segment = self.source_of(grant, control)
        pull = Pull(remote, segment, offset, nbytes, number)
        segment.users += 1
        remote.pulls.add(pull)
        return pull

    async def _begin(self, pull: Pull, land: Land) -> None:
        try:
            await self._in_thread(lambda: pull.begin(self.driver, land))
        except Exception as error:  # noqa: BLE001 - the waiter gets it
            self._over(pull, error)
        except BaseException:
            # `close` waits for the device.
            pull.set_over()
            raise
        else:
            self._begun(pull)

    def _begun(self, pull: Pull) -> None:
        pull.set_queued()
        self.watch.add(cast(Event, pull.event), partial(self._over, pull))

    def _over(self, pull: Pull, error: Exception | None) -> None:
        pull.settle(error)
        self._end(pull)
        if not self._closed:
            self._send(pull.remote, RETURN, pull.grant)

    def _end(self, pull: Pull) -> None:
        pull.landing = None
        pull.set_over()
        pull.remote.pulls.discard(pull)
        self._unused(pull.segment)

    def _reading(self, grant: Grant, control: Control) -> Reading | None:
        """None if the bytes are on no device of this process."""
        device = self.device_of(grant, control)
        if device is None:
            return None
        _, offset, nbytes, number = cast(tuple[int, int, int, int], grant)
        remote, segment = self.source_of(grant, control)
        segment.users += 1
        return Reading(segment, device, offset, nbytes, partial(self._dropped, remote, segment, number, device))

    def _dropped(
        self,
        remote: Remote,
        segment: RemoteSegment | DeviceSegment,
        number: int,
        device: int,
        streams: Collection[int],
    ) -> None:
        left = list(streams)
        self._host.call_soon(lambda: self._wait_unused(remote, segment, number, device, left))

    def _wait_unused(
        self, remote: Remote, segment: RemoteSegment | DeviceSegment, number: int, device: int, left: list[int]
    ) -> None:
        if self._closed:
            return
        while left:
            stream = left.pop()
            try:
                if self.driver.is_idle(device, stream):
                    continue
                event = self.driver.record(device, stream)
            except TransportError:
                # A stream that is gone, or a device that failed, reads no more.
                continue
            self.watch.add(event, lambda _: self._wait_unused(remote, segment, number, device, left))
            return
        self._unused(segment)
        self._send(remote, RETURN, number)

    def _unused(self, segment: RemoteSegment | DeviceSegment) -> None:
        segment.users -= 1
        if isinstance(segment, RemoteSegment):
            self._shut_if_unused(segment)

    def _give_up(self, segment: RemoteSegment, closed: Callable[[], object]) -> None:
        segment.gone = closed
        self._shut_if_unused(segment)

    def _shut_if_unused(self, segment: RemoteSegment) -> None:
        if segment.gone is not None and not segment.users and not self._closed:
            closed, segment.gone = segment.gone, None
            self._host.create_task(self._shut(segment, closed), name="close device memory of a peer")

    async def _shut(self, segment: RemoteSegment, closed: Callable[[], object]) -> None:
        for device in list(segment.addresses):
            await self._idle(device)
        if segment.addresses:
            # Before that, `close` would close it.
            await self._in_thread(lambda: segment.shut(self.driver))
        self._foreign.discard(segment)
        closed()

    def _tell_gone(self, number: int) -> None:
        segment = self._segments.get(number)
        if segment is not None:
            segment.waiting = {peer for peer, remote in self.remotes.items() if number in remote.told}
            super()._tell_gone(number)
            self._free_if_closed(segment)

    def _closed_at(self, segment: DeviceSegment, peer: str) -> None:
        segment.waiting.discard(peer)
        self._free_if_closed(segment)

    def _free_if_closed(self, segment: DeviceSegment) -> None:
        if not segment.waiting and not self._closed:
            self._host.create_task(self._free_in_thread(segment), name="free device memory")

    async def _idle(self, device: int) -> None:
        """A call that gives memory back waits for the device, and meanwhile the driver lets other calls of the process
        wait, too (measured as above), even if they do not wait for the device themselves.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            event = self.driver.record(device, _DEFAULT_STREAM)
        except TransportError:
            return
        self.watch.add(event, lambda _: None if done.done() else done.set_result(None))
        await done

    async def _free_in_thread(self, segment: DeviceSegment) -> None:
        if not segment.is_lent:
            await self._idle(segment.device)
        # From now on `close` does not free it.
        if self._segments.pop(segment.id, None) is not None:
            await self._in_thread(lambda: self._free(segment))

    def _free(self, segment: DeviceSegment) -> None:
        # A device that failed keeps its memory until the process ends.
        with suppress(DeviceError):
            if not segment.is_lent:
                self.driver.free(segment.device, segment.address)


def _check_filled(block: DeviceBlock) -> None:
    if block.error is not None:
        raise block.error
    if not block.filled:
        raise GrantError("the block is granted before the device has filled it")
