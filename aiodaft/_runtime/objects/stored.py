"""Encoded values that other processes may pull."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from aiodaft._protocol.connections.messages import INLINE_LIMIT
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.platform.linux import exhausted
from aiodaft._runtime.serialization.decoder import ReceivedValue, decode_small
from aiodaft._runtime.serialization.encoded import Encoded, Source
from aiodaft._runtime.serialization.encoder import Names, encode
from aiodaft._runtime.serialization.small import NAMED
from aiodaft.exceptions import ResourceExhausted
from aiodaft.reading import Borrowed
from aiodaft_transport import Block, Grant, Pullable, Transport

if TYPE_CHECKING:
    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.objects.devices import Devices
    from aiodaft_transport.cuda.device import DeviceBlock


class StoredValue:
    """An encoded value that peers may pull: a small one is bytes, a large one lies in blocks.

    Its user calls `release`; the destructor does it for a value whose task ended before it handed the value on.
    """

    # Defaults live in the class: most values are small, and set only the fields that they need.
    inline: bytes | None = None
    block: Block | None = None
    packed = False
    # The call that made it, such as "Model.execute"; "" for a copy of another process's value.
    label = ""
    kind = ""
    # For a copy that is relayed: the process that made the value.
    root: PeerId | None = None
    on_release: Callable[[], object] | None = None
    # Copies on accelerators, in the order of the blobs; and these with the lent memory.
    _captured: Sequence[DeviceBlock] = ()
    _device_blocks: Sequence[DeviceBlock] = ()
    # The transport that it was packed for, and the function that chooses the one to another process.
    _transport: Transport | None = None
    _carrier: Callable[[Route], Transport] | None = None
    # Runs a callback on the loop. Safe in any thread, also during a garbage collection.
    _on_loop: Callable[[Callable[[], object]], object] | None = None
    _released = False

    def __init__(
        self,
        encoded: Encoded,
        lender: Borrowed[Any] | None = None,
        via: str | None = None,
        devices: Devices | None = None,
        on_loop: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        if lender is not None:
            for source in encoded.sources:
                source.lent |= source.device is None
        self._devices = devices
        if devices is not None:
            self._captured = devices.take(encoded)
            lent = [source.block for source in encoded.sources if source.device is not None and source.is_apart]
            self._device_blocks = [*cast("list[DeviceBlock]", lent), *self._captured]
        self.encoded = encoded
        self.size = encoded.size
        self.is_inline = devices is None and self.size <= INLINE_LIMIT and not encoded.is_apart
        self.payload = encoded.payload
        self.refs = encoded.refs
        self.origins = [source.origin for source in encoded.sources]
        self.lent = encoded.lent
        self._versions = encoded.versions()
        self._lender = lender
        self.via = via
        self._on_loop = on_loop

    def __del__(self) -> None:
        if self._released or self._on_loop is None:
            return
        if self.block is not None or self._devices is not None or self._lender is not None:
            self._on_loop(partial(StoredValue.release, self))

    @classmethod
    def again(cls, received: ReceivedValue) -> StoredValue:
        encoded, inline = Encoded(received.payload, refs=received.refs), received.inline
        if encoded.payload[0] == NAMED:
            # Its next receiver was not told the names.
            encoded = encode(decode_small(encoded.payload, received.heard), names=Names("a value"))
            inline = encoded.packed()
        stored = cls(encoded)
        stored.inline = inline
        stored.packed = True
        return stored

    @classmethod
    def copy_of(
        cls,
        received: ReceivedValue,
        via: str | None,
        root: PeerId | None = None,
        on_loop: Callable[[Callable[[], object]], object] | None = None,
    ) -> StoredValue:
        """A large received value for other processes; pack it before code of this process changes it."""
        (blob,) = received.blobs
        encoded = Encoded(received.payload, [Source.of(blob)], [0], blob.nbytes, refs=received.refs)
        stored = cls(encoded, via=via, on_loop=on_loop)
        stored.root = root
        # The buffers come from no objects of this process.
        stored.origins = []
        return stored

    @classmethod
    def landed(
        cls,
        received: ReceivedValue,
        block: Block,
        transport: Transport,
        carrier: Callable[[Route], Transport],
        root: PeerId | None,
    ) -> StoredValue:
        """A large value that came into a block of this process; see `pack`."""
        stored = cls(Encoded(received.payload, [], [], block.nbytes, refs=received.refs))
        stored.root, stored.block, stored.packed = root, block, True
        stored._transport, stored._carrier = transport, carrier
        stored.size += block.nbytes
        stored.is_inline = False
        return stored

    def blobs(self) -> list[tuple[Pullable, bool]]:
        """The packed buffers, and for each whether it is in the memory of an accelerator."""
        blobs: list[tuple[Pullable, bool]] = [] if self.block is None else [(self.block, False)]
        if not self.lent and self._devices is None:
            return blobs
        apart = [source for source in self.encoded.sources if source.block is not None]
        blobs += [(cast("Pullable", source.block), source.device is not None) for source in apart]
        return blobs + [(block, True) for block in self._captured]

    def _grants(self, connection: Route) -> Generator[tuple[Transport, Grant]]:
        for block, on_device in self.blobs():
            if on_device:
                yield cast("Devices", self._devices).grant(cast("DeviceBlock", block), connection)
            else:
                transport = cast("Callable[[Route], Transport]", self._carrier)(connection)
                yield transport, transport.grant(transport.adopt(cast("Block", block)), connection)

    @property
    def wholly_lent(self) -> bool:
        """Whether every buffer is read in place."""
        return self.lent and all(source.lent for source in self.encoded.sources)

    @property
    def is_free(self) -> bool:
        """Whether keeping it keeps nothing else: no memory of the user, no block, no ref."""
        return self.is_inline and self._lender is None and not (self.lent or self.refs)

    @property
    def ready(self) -> bool:
        """Whether it can be granted without waiting."""
        return self.packed and (self._devices is None or all(block.settled for block in self._device_blocks))

    @property
    def shared(self) -> bool:
        return self._transport is not None and self._transport.shared

    def can_be_relayed(self, limit: int, connection: Route) -> bool:
        """Whether a consumer may pass it on: it is one blob of more than `limit` bytes, and bytes are sent there.

        Values on accelerators go to each consumer directly: a copy for others would take memory of the accelerator.
        """
        if self._devices is not None or self.root is not None or self._transport is None:
            return False
        if self.shared and connection.shares_memory:
            return False
        blobs = self.blobs()
        return len(blobs) == 1 and blobs[0][0].nbytes > limit

    def when_filled(self, callback: Callable[[], object]) -> None:
        waiting = [block for block in self._device_blocks if not block.settled]
        if not waiting:
            callback()
        else:
            waiting[0].on_filled(lambda: self.when_filled(callback))

    async def wait_filled(self) -> None:
        filled = asyncio.Event()
        self.when_filled(filled.set)
        await filled.wait()

    def pack(self, transport: Transport, carrier: Callable[[Route], Transport]) -> None:
        """Copy the buffers to where peers can reach them. May take long; of lent memory, `settle` comes later.

        Raises:
            BorrowError: A tensor was written to since it was lent, or during the copy.
            ResourceExhausted: There is no memory or descriptor for them.
        """
        if self.packed or self.block is not None or self.inline is not None:
            return
        self._transport, self._carrier = transport, carrier
        encoded = self.encoded
        encoded.check_unchanged(self._versions)
        if self.is_inline:
            self.inline = encoded.packed()
        elif encoded.nbytes:
            try:
                block = transport.allocate(encoded.nbytes)
            except OSError as error:
                raise self._refused(error) from error
            # The view keeps the memory mapped while this thread writes to it, even if the transport is closed.
            view = block.view
            try:
                encoded.write_to(block.address)
                # If a tensor was written to meanwhile, the copy is a mixture.
                encoded.check_unchanged(self._versions)
            except BaseException:
                block.release()
                raise
            finally:
                del view
            self.block = block
            if self._released:
                block.release()
        self.packed = self._lender is None or not encoded.nbytes
        for index, source in enumerate(encoded.sources):
            if not source.lent:
                # From here on the original may change.
                source.keep = source.fill = source.version = self._versions[index] = None

    def settle(self) -> None:
        """The copy of lent memory is whole: operations of threads that it came after are over.

        Raises:
            BorrowError: A tensor was written to since it was lent.
        """
        self.encoded.check_unchanged(self._versions)
        self.packed = True

    @property
    def in_host_memory(self) -> bool:
        return self.packed and not self.is_inline and self._devices is None

    @contextmanager
    def in_place(self) -> Generator[ReceivedValue]:
        """The buffers where they lie, to be read in the block of code alone; for one that is `in_host_memory`."""
        blocks = [cast("Block", block) for block, _ in self.blobs()]
        for block in blocks:
            block.take_grant()
        try:
            yield ReceivedValue(self.payload, None, [block.view for block in blocks], self.refs)
        finally:
            for block in blocks:
                block.return_grant()

    def check_unchanged(self) -> None:
        if self.lent:
            self.encoded.check_unchanged(self._versions)

    def blobs_for(self, connection: Route) -> bytes | tuple[tuple[str, Grant], ...] | None:
        """Grant the blocks to a peer. Returns the field for the message.

        Raises:
            BorrowError: A lent buffer was written to.
            ResourceExhausted: There is no descriptor for it.
            Unreachable: The transport that the user chose does not lead there.
        """
        self.check_unchanged()
        # A lost process would never return a grant.
        blobs = self.blobs() if connection.lost is None else []
        if not (self.packed and blobs):
            return self.inline
        traffic = connection.traffic
        traffic.payloads_sent += len(blobs)
        traffic.payload_sent += sum(block.nbytes for block, _ in blobs)
        if self._devices is not None and connection.shares_memory:
            traffic.device_sent += sum(block.nbytes for block in self._device_blocks)
        granted: list[tuple[Transport, Grant]] = []
        try:
            for transport, grant in self._grants(connection):
                granted.append((transport, grant))
                if connection.lost is not None:
                    # The connection broke while the transport sent a note: all grants have ended.
                    return self.inline
        except BaseException as error:
            # No message will carry the earlier grants.
            for transport, grant in granted:
                transport.revoke(grant, connection)
            if isinstance(error, OSError):
                raise self._refused(error) from error
            raise
        return tuple((transport.name, grant) for transport, grant in granted)

    def _refused(self, error: OSError) -> ResourceExhausted:
        return exhausted(error, f"a value of {self.size:,} bytes cannot be sent")

    def origin(self, index: int) -> Any:
        find = self.origins[index] if self.origins else None
        return None if find is None else find()

    def objects(self) -> ReceivedValue | None:
        """A lent value as the objects that its buffers were made of; None if one is gone, or was changed.

        Those on accelerators are as they were lent once the value is filled.
        """
        found = [self.origin(index) for index in range(len(self.encoded.sources))] if self.lent else [None]
        if any(one is None for one in found):
            return None
        received = ReceivedValue(self.payload, None, [], self.refs)
        received.origin = found.__getitem__
        return received

    def release(self) -> None:
        """Release the memory: it is reused once the last reader is done. Idempotent."""
        if self._released:
            return
        self._released = True
        for block in (self.block, *self._device_blocks):
            if block is not None:
                block.release()
        if self.on_release is not None:
            self.on_release()
        if self._lender is not None:
            self.when_unread(self._lender.mark_released)

    def when_unread(self, callback: Callable[[], object]) -> None:
        waiting = [block for block, _ in self.blobs() if block.grants]
        if not waiting:
            callback()
        else:
            waiting[0].on_unread(lambda: self.when_unread(callback))

    async def wait_unread(self) -> None:
        unread = asyncio.Event()
        self.when_unread(unread.set)
        await unread.wait()
