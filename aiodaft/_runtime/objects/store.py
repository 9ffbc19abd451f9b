"""Values that this process keeps for others, and the memory they are in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.threads import SYNC_COPY
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.decoder import decode, is_heavy
from aiodaft._runtime.serialization.encoded import Source
from aiodaft._runtime.serialization.encoder import Names, encode
from aiodaft._runtime.serialization.pickling import TooLong
from aiodaft._runtime.serialization.tensors import Places, loaded_torch, memory_of, nowhere
from aiodaft.ref import Borrowed
from aiodaft_transport import DEVICE_NAME, Block, Grant, Transport
from aiodaft_transport.forks import fork_count
from aiodaft_transport.memory.address import view_at

if TYPE_CHECKING:
    import torch

    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.objects.devices import Accelerators, Devices

T = TypeVar("T")

Key: TypeAlias = tuple[PeerId, CallId]


class Store:
    """The values of one process."""

    def __init__(self, process: Process, open_transport: Callable[[str], Transport]) -> None:
        self._process = process
        self.call_soon = process.call_soon
        # Whether accelerators give and take values themselves, without memory of the host.
        self._direct = process.options.direct
        self._devices: Devices | None = None
        self._lock = threading.Lock()
        self._helper_thread = process.helper_thread
        self._open_transport = open_transport
        self._transports: dict[str, Transport] = {}
        self._preferred = process.options.transport
        self._forks = fork_count()
        # Memory of tensors by its address: made by `empty()`, with the count of forks then; and bytes of what the user
        # registered.
        self._shared: dict[int, tuple[Block, int]] = {}
        self._registered: dict[int, int] = {}
        self.entries: dict[Key, StoredValue] = {}

    @property
    def transport(self) -> Transport:
        """How payloads leave this process."""
        return self.transport_named(self._preferred)

    def transport_named(self, name: str) -> Transport:
        """The transport with this name, opened when first needed. Safe in any thread."""
        if name == DEVICE_NAME:
            return cast("Transport", self.devices.transport)
        known = self._transports.get(name)
        if known is not None:
            return known
        # The loop, an actor's thread and the helper thread may come here at the same time. All of them get the one that
        # is stored first; a transport that is not stored has opened nothing yet.
        transport = self._transports.setdefault(name, self._open_transport(name))
        for address, nbytes in list(self._registered.items()):
            transport.register(address, nbytes)
            if address not in self._registered:
                # Another thread has unregistered it, perhaps before it was registered here.
                transport.unregister(address)
        return transport

    @property
    def devices(self) -> Devices:
        """The accelerators; what deals with them is loaded when first needed."""
        with self._lock:
            if self._devices is None:
                from aiodaft._runtime.objects.devices import Devices, Gpus  # noqa: PLC0415 - few programs have accelerators

                self._devices = Devices(Gpus(), self._process, self._process.id)
            return self._devices

    def use_accelerators(self, kind: Accelerators) -> None:
        """Use another kind of accelerator from now on, before any value is on one."""
        from aiodaft._runtime.objects.devices import Devices  # noqa: PLC0415 - few programs have accelerators

        self._devices = Devices(kind, self._process, self._process.id)

    def current_streams(self) -> Sequence[Any]:
        """Where this thread's work on accelerators goes; nothing if there never was any."""
        torch = loaded_torch()
        if self._devices is None and (torch is None or not torch.cuda.is_initialized()):
            return ()
        return self.devices.kind.current_streams()

    def _find_device(self, tensor: Any) -> int | None:
        if self._devices is None and not tensor.is_cuda:
            return None
        return self.devices.kind.device_of(tensor)

    def keep(
        self,
        value: Any,
        names: Names,
        *,
        via: str | None = None,
        lender: Borrowed[Any] | None = None,
        resolve: bool = False,
        patient: bool = False,
    ) -> StoredValue:
        """Encode a value; see `serialization.encode`. Safe in any thread."""

        def find_block(source: Source) -> Block | None:
            return self._find_block(source, via or self._preferred)

        # Who asks for a transport gets it, also for what accelerators have.
        find_device = self._find_device if self._direct and via is None else nowhere
        places = Places(find_block, find_device, lend=lender is not None, home=self._process)
        encoded = encode(value, names=names, places=places, resolve=resolve, patient=patient)
        return StoredValue(encoded, lender, via, self._devices if encoded.on_device else None, self.call_soon)

    def _find_block(self, source: Source, name: str) -> Block | None:
        """The block that a tensor's memory is, if the transport reads it where it lies."""
        shared = self._shared.get(source.address) if name == self._preferred else None
        if shared is not None:
            return shared[0]
        if not self._registered or source.nbytes <= m.INLINE_LIMIT:
            # Small ones travel better together.
            return None
        return self.transport_named(name).block_at(view_at(source.address, source.nbytes, source.keep))

    async def keep_anywhere(
        self,
        value: Any,
        names: Names,
        *,
        via: str | None = None,
        lender: Borrowed[Any] | None = None,
        resolve: bool = False,
        streams: Sequence[Any] | None = None,
    ) -> StoredValue:
        """Encode a value here if that is quick, else in the helper thread.

        `streams` are the `current_streams` of whoever gave the value, if that was earlier.
        """
        keep = partial(self.keep, value, names, via=via, lender=lender, resolve=resolve)
        try:
            return keep()
        except TooLong:
            streams = self.current_streams() if streams is None else streams
            return await self._helper_thread.run(partial(self._run_in_order, streams, partial(keep, patient=True)))

    def _run_in_order(self, streams: Sequence[Any], job: Callable[[], T]) -> T:
        if not streams:
            return job()
        with self.devices.kind.using(streams):
            return job()

    def pack_now(self, kept: StoredValue) -> bool:
        """Pack what is in host memory if that takes no time worth mentioning; False if it does."""
        if kept.packed:
            return True
        if kept.encoded.nbytes > SYNC_COPY:
            return False
        self.pack_here(kept)
        return True

    def pack_here(self, kept: StoredValue) -> None:
        """Pack what is in host memory in this thread, however long that takes."""
        kept.pack(self.transport_named(kept.via or self._preferred))

    async def pack(self, kept: StoredValue) -> None:
        """Pack what is in host memory, in the helper thread if it is large."""
        if not self.pack_now(kept):
            await self._helper_thread.run(lambda: self.pack_here(kept))

    async def make_ready(self, kept: StoredValue) -> None:
        """Bring a value to where it may be granted."""
        await self.pack(kept)
        await kept.wait_filled()

    def keep_patiently(self, result: Any, label: str, via: str | None) -> StoredValue:
        """In a thread that may take its time: encode a result, and copy its buffers to where peers can reach them."""
        lender = result if isinstance(result, Borrowed) else None
        value = result if lender is None else lender.value
        kept = self.keep(value, Names(label, (("result", value),)), via=via, lender=lender, patient=True)
        if not kept.lent:
            self.pack_here(kept)
        return kept

    async def decode(
        self, arrived: ReceivedValue, slots: list[Any] | None = None, refs: list[Any] | None = None
    ) -> Any:
        """Decode a value here if that is quick, else in the helper thread."""
        if is_heavy(arrived.payload):
            return await self._helper_thread.run(lambda: self.decode_now(arrived, slots, refs, patient=True))
        return self.decode_now(arrived, slots, refs)

    def decode_now(
        self,
        arrived: ReceivedValue,
        slots: list[Any] | None = None,
        refs: list[Any] | None = None,
        *,
        patient: bool = False,
    ) -> Any:
        """Decode a value in this thread."""
        blobs = arrived.blobs if arrived.inline is None else [memoryview(bytearray(arrived.inline))]
        for blob in blobs:
            if not isinstance(blob, memoryview):
                self.devices.kind.take_over(blob)
        return decode(
            arrived.payload,
            blobs,
            slots=slots or (),
            refs=refs or (),
            origin=arrived.origin,
            patient=patient,
            home=self._process,
        )

    def copy(self, arrived: ReceivedValue) -> ReceivedValue:
        """The same value in memory of its own. Safe in any thread."""
        blobs = [self._copy_blob(blob) for blob in arrived.blobs]
        return ReceivedValue(arrived.payload, arrived.inline, blobs, arrived.refs)

    def _copy_blob(self, blob: Any) -> Any:
        return memoryview(bytearray(blob)) if isinstance(blob, memoryview) else self.devices.kind.copy(blob)

    def memory_in(self, target: torch.Tensor, name: str, grant: Grant, connection: Route) -> Any:
        """What a transport is to fetch into, so that the bytes come into a tensor; None if it cannot write there."""
        device = self._find_device(target)
        if name != DEVICE_NAME:
            return memory_of(target) if device is None and target.device.type == "cpu" else None
        return None if device is None else self.devices.memory_in(target, device, grant, connection)

    async def run_to_end(self, job: Callable[[], object]) -> None:
        """Run what writes to memory of the caller's in the helper thread, behind what this thread's streams have to do.

        Cancellation: raised once the job has ended.
        """
        await self._helper_thread.run_to_end(partial(self._run_in_order, self.current_streams(), job))

    def decline(self, connection: Route, blobs: Any) -> None:
        """Give back grants that nobody wants any more."""
        for name, grant in blobs if isinstance(blobs, tuple) else ():
            self.transport_named(name).decline(grant, connection)

    def revoke(self, connection: Route, blobs: Any) -> None:
        """Take back grants in a message that is not sent."""
        for name, grant in blobs if isinstance(blobs, tuple) else ():
            self.transport_named(name).revoke(grant, connection)

    def release_came(self, route: Route, message: m.Message) -> None:
        """RELEASE came: the owner does not need these values any more."""
        for number in m.read_release(message):
            self.drop((route.remote, number))

    def drop(self, key: Key) -> None:
        """Free a value that its owner does not need any more."""
        kept = self.entries.pop(key, None)
        if kept is not None:
            kept.release()

    def stored_bytes(self) -> int:
        """Bytes of values kept for their owners."""
        return sum(kept.encoded.size for kept in self.entries.values())

    def relayed_bytes(self) -> int:
        """Bytes of copies that are kept for other consumers."""
        return sum(kept.encoded.size for kept in self.entries.values() if kept.root is not None)

    def drop_relayed(self, key: Key, root: PeerId) -> None:
        """Free the copy of a value that its producer has freed."""
        kept = self.entries.get(key)
        if kept is not None and kept.root == root:
            self.drop(key)

    def process_lost(self, remote: PeerId) -> None:
        """Free every value of an owner that is gone, and every copy of a value that was made there."""
        for key in [key for key, kept in self.entries.items() if remote in (key[0], kept.root)]:
            self.drop(key)

    def share(self, address: int, block: Block) -> None:
        """Remember that a tensor made by `empty()` begins at an address."""
        self._shared[address] = block, self._forks.value

    def unshare(self, address: int) -> None:
        """The tensor is gone: its block is reused once nobody reads it, unless a forked child may have the tensor."""
        block, forks = self._shared.pop(address)
        if self._forks.value != forks:
            block.retire()
        block.release()

    def register(self, address: int, nbytes: int) -> None:
        """Prepare every transport, also those that are opened later, for memory of the user's. Safe in any thread.

        Raises:
            ValueError: Part of it is registered.
        """
        with self._lock:
            known = list(self._registered.items())
            if any(start < address + nbytes and address < start + size for start, size in known):
                raise ValueError("the memory, or part of it, is registered already")
            self._registered[address] = nbytes
        for transport in list(self._transports.values()):
            transport.register(address, nbytes)

    def unregister(self, address: int) -> None:
        """The opposite. Safe in any thread, also while garbage is collected."""
        del self._registered[address]
        for transport in list(self._transports.values()):
            transport.unregister(address)

    def peer_lost(self, peer: PeerId) -> None:
        """Forget a peer's grants and mappings."""
        for transport in self._opened():
            transport.peer_lost(peer)

    def close(self) -> None:
        """Free everything."""
        for key in list(self.entries):
            self.drop(key)
        for transport in self._opened():
            transport.close()

    def _opened(self) -> list[Transport]:
        devices = [] if self._devices is None else [cast("Transport", self._devices.transport)]
        return [*self._transports.values(), *devices]
