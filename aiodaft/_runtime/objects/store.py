"""Values that this process stores for others, the transports that allocate their memory, and targets of `Ref.into`."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.objects.value import Key
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.linux import exhausted
from aiodaft._runtime.platform.threads import SYNC_COPY, wait_passed
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.decoder import ReceivedValue, decode, decode_small, is_heavy, is_tensor, spec_of
from aiodaft._runtime.serialization.encoded import (
    Places,
    Source,
    fills_its_span,
    is_dense_tensor,
    kind_in,
    kind_of,
    loaded_torch,
    memory_of,
    nowhere,
    same_strides,
)
from aiodaft._runtime.serialization.encoder import Names, encode
from aiodaft._runtime.serialization.small import NAMED, SMALL
from aiodaft.reading import Borrowed, unwrap
from aiodaft_transport import DEVICE_NAME, Block, Grant, Transport, choose_name
from aiodaft_transport.memory import view_at
from aiodaft_transport.system import fork_count

if TYPE_CHECKING:
    import torch

    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.objects.devices import Accelerators, Devices


T = TypeVar("T")


class InPlace(Borrowed["torch.Tensor"]):
    """A tensor that is lent; `block` is its memory."""

    __slots__ = ("block",)

    def __init__(self, tensor: torch.Tensor, block: Block) -> None:
        super().__init__(tensor)
        self.block = block


class Store:
    def __init__(self, process: Process, open_transport: Callable[[str], Transport]) -> None:
        self.process = process
        self.call_soon = process.call_soon
        self._direct = process.options.direct
        self._devices: Devices | None = None
        self._lock = threading.Lock()
        self._helper_thread = process.helper_thread
        self._open_transport = open_transport
        self.transports: dict[str, Transport] = {}
        # The transport that the user chose for the whole runtime, if any; and the transport that values are stored for.
        self._chosen = None if process.options.direct else process.options.transport
        self._preferred = process.options.transport
        self._forks = fork_count()
        # By address: blocks of `empty()` tensors with the count of forks at that time; and sizes of memory that the
        # user registered.
        self._shared: dict[int, tuple[Block, int]] = {}
        self.registered: dict[int, int] = {}
        self.entries: dict[Key, StoredValue] = {}
        self._freed: asyncio.Event | None = None

    @property
    def transport(self) -> Transport:
        return self.transport_named(self._preferred)

    def transport_named(self, name: str) -> Transport:
        """The transport with a name, opened at the first use. Safe in any thread."""
        if name == DEVICE_NAME:
            return cast("Transport", self.devices.transport)
        known = self.transports.get(name)
        if known is not None:
            return known
        # Of several threads, all get the first transport that is entered; the others have opened nothing yet.
        transport = self.transports.setdefault(name, self._open_transport(name))
        for address, nbytes in list(self.registered.items()):
            transport.register(address, nbytes)
            if address not in self.registered:
                transport.unregister(address)
        return transport

    def carrier(self, via: str | None, route: Route) -> Transport:
        """The transport that carries a value to a process; `via`: the one that the user chose for it.

        Raises:
            Unreachable: The transport that the user chose does not lead there.
        """
        asked, one_machine = via or self._chosen, route.shares_memory
        return self.transport_named(choose_name(asked, one_machine=one_machine, ucx="ucx" in route.reached_by))

    @property
    def devices(self) -> Devices:
        with self._lock:
            if self._devices is None:
                from aiodaft._runtime.objects.devices import Gpus  # noqa: PLC0415 - few programs have accelerators

                self.use_accelerators(Gpus())
            return cast("Devices", self._devices)

    def use_accelerators(self, kind: Accelerators) -> None:
        from aiodaft._runtime.objects.devices import Devices  # noqa: PLC0415 - few programs have accelerators

        self._devices = Devices(kind, self.process, self.process.id, partial(self.transport_named, "tcp"))

    def current_streams(self) -> Sequence[Any]:
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
        small: bool = True,
    ) -> StoredValue:
        """Encode a value; see `serialization.encode`. `pack_now` comes next, in the same step of the loop.

        A `ReceivedValue` that is a moved tensor is kept as it came.
        """
        if isinstance(value, ReceivedValue):
            stored = StoredValue.copy_of(value, via, on_loop=self.call_soon)
            stored.label, stored.kind = names.whole, kind_in(spec_of(value.payload))
            return stored

        def find_block(source: Source) -> Block | None:
            if isinstance(lender, InPlace):
                return lender.block
            return self._find_block(source, via or self._preferred)

        # A transport that the user chose also moves values on accelerators.
        find_device = self._find_device if self._direct and via is None else nowhere
        places = Places(find_block, find_device, lend=lender is not None, home=self.process)
        encoded = encode(value, names=names, places=places, resolve=resolve, small=small)
        stored = StoredValue(encoded, lender, via, self._devices if encoded.on_device else None, self.call_soon)
        stored.label = names.whole
        if not stored.is_inline:
            stored.kind = kind_of(value)
        return stored

    def _find_block(self, source: Source, name: str) -> Block | None:
        shared = self._shared.get(source.address) if name == self._preferred else None
        if shared is not None:
            return shared[0]
        if not self.registered or source.nbytes <= m.INLINE_LIMIT:
            # Small buffers travel faster together.
            return None
        return self.transport_named(name).block_at(view_at(source.address, source.nbytes, source.keep))

    def _run_in_order(self, streams: Sequence[Any], job: Callable[[], T]) -> T:
        if not streams:
            return job()
        with self.devices.kind.using(streams):
            return job()

    def pack_now(self, stored: StoredValue) -> bool:
        """Pack the part in host memory, now that nothing has changed it; False if nothing can and it is large."""
        if not stored.packed and stored.encoded.nbytes > SYNC_COPY and stored.encoded.is_frozen:
            return False
        self.pack_here(stored)
        return True

    def pack_here(self, stored: StoredValue) -> None:
        stored.pack(self.transport_named(stored.via or self._preferred), partial(self.carrier, stored.via))

    def landed(self, received: ReceivedValue, block: Block, root: PeerId | None) -> StoredValue:
        return StoredValue.landed(received, block, self.transport, partial(self.carrier, None), root)

    async def pack(self, stored: StoredValue) -> None:
        """Pack the part in host memory, in the helper thread if nothing can change it and it is large."""
        if not self.pack_now(stored):
            await self._helper_thread.run(lambda: self.pack_here(stored))

    async def make_ready(self, stored: StoredValue) -> None:
        await self.pack(stored)
        if not stored.packed:
            await wait_passed()
            stored.settle()
        await stored.wait_filled()

    def capture(self, result: Any, label: str, what: str, via: str | None, *, small: bool = True) -> StoredValue:
        """Encode a result or item, and pack the parts that can change and are not lent."""
        value, lender = unwrap(result)
        stored = self.keep(value, Names(label, ((what, value),)), via=via, lender=lender, small=small)
        if not stored.wholly_lent:
            self.pack_now(stored)
        return stored

    def capture_from_thread(
        self, result: Any, label: str, what: str, via: str | None, *, small: bool = True
    ) -> StoredValue:
        """The same of a `def` method, on the loop, whose code could change the result; the thread waits for it.

        It comes after the work of the thread's streams.
        """
        job = partial(self.capture, result, label, what, via, small=small)
        return self.process.on_loop(partial(self._run_in_order, self.current_streams(), job))

    async def decode(
        self, received: ReceivedValue, slots: list[Any] | None = None, refs: list[Any] | None = None
    ) -> Any:
        if is_heavy(received.payload):
            decode = partial(self.decode_now, received, slots, refs, patient=True)
            streams = self.current_streams() if received.on_device else ()
            return await self._helper_thread.run(partial(self._run_in_order, streams, decode))
        return self.decode_now(received, slots, refs)

    def decode_now(
        self,
        received: ReceivedValue,
        slots: list[Any] | None = None,
        refs: list[Any] | None = None,
        *,
        patient: bool = False,
    ) -> Any:
        if received.payload[0] in (SMALL, NAMED):
            return decode_small(received.payload, received.heard)
        blobs: list[Any] = received.blobs if received.inline is None else [memoryview(bytearray(received.inline))]
        if received.on_device:
            take_over = self.devices.take_over
            blobs = [blob if isinstance(blob, memoryview) else take_over(blob) for blob in blobs]
        return decode(
            received.payload,
            blobs,
            slots=slots or (),
            refs=refs or (),
            origin=received.origin,
            patient=patient,
            home=self.process,
        )

    def copy(self, received: ReceivedValue) -> ReceivedValue:
        blobs = [self._copy_blob(blob) for blob in received.blobs]
        return ReceivedValue(received.payload, received.inline, blobs, received.refs, received.heard)

    def _copy_blob(self, blob: Any) -> Any:
        return memoryview(bytearray(blob)) if isinstance(blob, memoryview) else self.devices.copy(blob)

    def memory_in(self, target: torch.Tensor, name: str, grant: Grant, connection: Route) -> Any:
        """The memory of a tensor for a transport to fetch into; None if it cannot write there."""
        device = self._find_device(target)
        if name != DEVICE_NAME:
            return memory_of(target) if device is None and target.device.type == "cpu" else None
        return None if device is None else self.devices.memory_in(target, device, grant, connection)

    async def run_to_end(self, job: Callable[[], object]) -> None:
        """Run a job that writes to memory of the caller: in the helper thread, after the work of this thread's streams.

        Cancellation: raised once the job has ended.
        """
        await self._helper_thread.run_to_end(self.in_order(job))

    def in_order(self, job: Callable[[], T]) -> Callable[[], T]:
        """The job for another thread, after the work of this thread's streams."""
        return partial(self._run_in_order, self.current_streams(), job)

    def decline(self, connection: Route, blobs: Any) -> None:
        for name, grant in blobs if isinstance(blobs, tuple) else ():
            self.transport_named(name).decline(grant, connection)

    def revoke(self, connection: Route, blobs: Any) -> None:
        for name, grant in blobs if isinstance(blobs, tuple) else ():
            self.transport_named(name).revoke(grant, connection)

    def release_came(self, route: Route, message: m.Message) -> None:
        for number in m.read_release(message):
            self.drop((route.remote, number))

    def drop(self, key: Key) -> None:
        stored = self.entries.pop(key, None)
        if stored is not None:
            stored.release()
            self.note_freed()

    def note_freed(self) -> None:
        if self._freed is not None:
            self._freed.set()

    async def wait_freed(self) -> None:
        self._freed = asyncio.Event()
        await self._freed.wait()

    def stored_bytes(self) -> int:
        return sum(stored.size for stored in self.entries.values())

    def relayed_bytes(self) -> int:
        return sum(stored.size for stored in self.entries.values() if stored.root is not None)

    def drop_relayed(self, key: Key, root: PeerId) -> None:
        stored = self.entries.get(key)
        if stored is not None and stored.root == root:
            self.drop(key)

    def peer_lost(self, remote: PeerId) -> None:
        """Forget a peer's grants and mappings; free the values that it owned, and the copies of values it made."""
        for transport in self._opened():
            transport.peer_lost(remote)
        for key in [key for key, stored in self.entries.items() if remote in (key[0], stored.root)]:
            self.drop(key)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        import torch  # noqa: PLC0415 - optional package

        nbytes = shape.numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        block = self.transport.allocate(nbytes)
        flat = torch.frombuffer(block.view, dtype=torch.uint8, count=nbytes)
        storage: Any = flat.untyped_storage()
        self._shared[block.address] = block, self._forks.value
        weakref.finalize(storage, self._unshare, block.address).atexit = False
        return flat.view(dtype).view(shape)

    def _unshare(self, address: int) -> None:
        """Release the block of a freed tensor. It is not reused if a forked child may have the tensor."""
        block, forks = self._shared.pop(address)
        if self._forks.value != forks:
            block.retire()
        block.release()

    def lend_to(self, route: Route, tensor: torch.Tensor) -> InPlace | None:
        """A CPU tensor without gaps as a result for one process alone, which gets it in place.

        None if the transport there carries only memory that it has allocated.
        """
        block = self.carrier(None, route).block_of(memory_of(tensor))
        return None if block is None else InPlace(tensor, block)

    @contextmanager
    def admitted(self, tensors: Mapping[str, torch.Tensor], route: Route) -> Generator[dict[str, Grant]]:
        """Let a process write to tensors of `empty` while the block of code runs; gives the grants by name.

        Only tensors in memory that the process can map are granted. If the block of code raises, their memory is not
        reused.

        Raises:
            ResourceExhausted: There is no descriptor for it.
        """
        transport = self.carrier(None, route)
        admitted: dict[str, tuple[Block, Grant]] = {}
        try:
            try:
                for name, tensor in tensors.items():
                    shared = self._shared.get(tensor.untyped_storage().data_ptr())
                    grant = None if shared is None else transport.admit(shared[0], route)
                    if shared is not None and grant is not None:
                        admitted[name] = shared[0], grant
            except OSError as error:
                raise exhausted(error, f"{route.remote} cannot write to memory of this process") from error
            yield {name: grant for name, (_, grant) in admitted.items()}
        except BaseException:
            for block, _ in admitted.values():
                block.retire()
            raise
        finally:
            for _, grant in admitted.values():
                transport.revoke(grant, route)

    def place(self, grant: Grant, route: Route) -> torch.Tensor:
        """The memory that a process lets this one write to, as bytes; see `admitted`.

        Raises:
            ResourceExhausted: This process has no memory or descriptor for it.
            TransportError: It is not known here.
        """
        import torch  # noqa: PLC0415 - optional package

        try:
            return torch.frombuffer(self.carrier(None, route).place(grant, route), dtype=torch.uint8)
        except OSError as error:
            raise exhausted(error, f"memory of {route.remote} cannot be written to") from error

    def register(self, address: int, nbytes: int) -> None:
        """Register memory of the user with every transport, also with later ones. Safe in any thread.

        Raises:
            ValueError: Part of it is registered already.
        """
        with self._lock:
            known = list(self.registered.items())
            if any(start < address + nbytes and address < start + size for start, size in known):
                raise ValueError("the memory, or part of it, is registered already")
            self.registered[address] = nbytes
        for transport in list(self.transports.values()):
            transport.register(address, nbytes)

    def unregister(self, address: int) -> None:
        del self.registered[address]
        for transport in list(self.transports.values()):
            transport.unregister(address)

    def close(self) -> None:
        for key in list(self.entries):
            self.drop(key)
        for transport in self._opened():
            transport.close()

    def _opened(self) -> list[Transport]:
        devices = [] if self._devices is None else [cast("Transport", self._devices.transport)]
        return [*self.transports.values(), *devices]


# The target of `Ref.into()`: a tensor that exists already.
#
# A transport writes the bytes of a tensor that has the target's layout in memory straight into the target. Any other
# value is brought here first, and copied.


class IntoTensor:
    def __init__(self, target: Any, label: str) -> None:
        """Raises TypeError: the target is no tensor that has memory. ValueError: elements of it share memory."""
        self._label = label
        if not is_dense_tensor(target) or target.device.type == "meta":
            kind = "a meta tensor" if is_dense_tensor(target) else type(target).__name__
            raise TypeError(f"the result of {label} cannot be written into {kind}: `into` takes a tensor")
        if any(step == 0 and length > 1 for length, step in zip(target.shape, target.stride(), strict=True)):
            raise ValueError(f"the result of {label} cannot be written into an expanded tensor: its elements overlap")
        self.target: torch.Tensor = target
        self.filled = False

    def fits(self, payload: bytes, nbytes: int) -> bool:
        """Whether a value is one block with exactly the bytes of the target.

        Raises:
            ValueError: It is a tensor of another shape or dtype.
        """
        if not is_tensor(payload):
            return False
        _, dtype, size, stride, start, _, _ = spec_of(payload)
        target = self.target
        self._check(size, f"torch.{dtype}")
        alike = not start and nbytes == target.nbytes and same_strides(size, stride, target.stride())
        return alike and not (target.is_conj() or target.is_neg()) and fills_its_span(target)

    async def fill(self, fetching: Awaitable[None]) -> None:
        # Tells autograd, and code that reads the target at the same time.
        self._count_write()
        try:
            await fetching
        finally:
            self._count_write()
        self.filled = True

    def _count_write(self) -> None:
        torch = loaded_torch()
        assert torch is not None
        torch.autograd.graph.increment_version(self.target)

    async def copy(self, value: Any, store: Store) -> None:
        """Copy a value into the target, in the helper thread if that takes long.

        Raises:
            TypeError: It is no tensor.
            ValueError: It has another shape or dtype.

        Cancellation: after the copy.
        """
        if value is self.target:
            return
        if not is_dense_tensor(value):
            raise TypeError(
                f"the result of {self._label} is {type(value).__name__}, and `into` writes a tensor into a tensor"
            )
        self._check(value.shape, str(value.dtype))
        # Between host and device, the copy waits for the streams.
        if self.target.nbytes > SYNC_COPY or value.device != self.target.device:
            await store.run_to_end(lambda: self._write(value))
        else:
            self._write(value)

    def _write(self, value: torch.Tensor) -> None:
        self.target.detach().copy_(value.detach())

    def _check(self, size: Any, dtype: str) -> None:
        target = self.target
        if list(size) != list(target.shape) or dtype != str(target.dtype):
            raise ValueError(
                f"the result of {self._label} has shape {tuple(size)} and {dtype}, "
                f"and cannot be written into a tensor of shape {tuple(target.shape)} and {target.dtype}"
            )
