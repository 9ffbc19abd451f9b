"""GPUs that are memory of the host, for tests without a GPU: tensors on them move as those on real GPUs do.

Their memory lies in memfds, which other processes open through /proc. Streams are queues of work, which is done when
the framework asks for their state, up to a closed gate.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Any

from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.process import current_process
from aiodaft._runtime.serialization.small import host_accelerators
from aiodaft_transport.cuda.device import IDENTITY_SIZE, Event, Export, Landing, Span
from aiodaft_transport.cuda.transport import Reading
from aiodaft_transport.exceptions import DeviceError, OutOfDeviceMemory, Unreachable
from aiodaft_transport.memory import view_at

if TYPE_CHECKING:
    import torch

_HANDLE = struct.Struct("<QQQQ")  # process, driver in it, descriptor, size


def identity(number: int) -> bytes:
    """The identity of the device with this number, in every process."""
    return number.to_bytes(IDENTITY_SIZE, "big")


class Gate:
    """Work of a stream that ends when a test opens the gate: a slow kernel."""

    def __init__(self) -> None:
        self.open = False


def use_host_devices(*devices: int) -> HostDriver:
    """Give the process that runs this fake GPUs in place of real ones; call it before any value is on a GPU.

    Args:
        devices: The numbers of the machine's GPUs that the process sees. None: it has no GPU.
    """
    driver = HostDriver(*devices)
    if not devices:
        driver.identities = []
    accelerators = HostAccelerators(driver)
    current_process().part(Store).use_accelerators(accelerators)
    host_accelerators.add(weakref.ref(accelerators, host_accelerators.discard))
    return driver


class HostDriver:
    """Drives fake GPUs. `devices` says which of the machine this process sees, in its order."""

    def __init__(self, *devices: int, memory: int = 1 << 40) -> None:
        self.identities: Sequence[bytes] = [identity(number) for number in devices or (0,)]
        # Devices with memory that cannot be opened here.
        self.out_of_reach: set[bytes] = set()
        self.broken: str | None = None
        self.memory_left = memory
        # Memory that the tensor library keeps for later: it gives it back when it is asked to.
        self.cached = 0
        self.made = 0
        # The mappings, by address; and the descriptors and numbers of the memory that was allocated here.
        self.mapped: dict[int, mmap] = {}
        self.allocated: dict[int, int] = {}
        self._made_as: dict[int, int] = {}
        self.copied = 0
        self._streams: dict[int, deque[Gate | Callable[[], object]]] = {}
        self._events: dict[int, bool] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        # The current stream of a thread, and whether it works apart.
        self._here = threading.local()

    @contextmanager
    def apart(self) -> Generator[None]:
        self._here.is_apart = True
        try:
            yield
        finally:
            self._here.is_apart = False

    @property
    def is_apart(self) -> bool:
        """Whether this thread's work with the tensor library ends no capture of a graph."""
        return getattr(self._here, "is_apart", False)

    def memory(self, device: int) -> int:
        return 1 << 30

    def allocate(self, device: int, nbytes: int) -> int:
        if nbytes > self.memory_left:
            raise OutOfDeviceMemory(f"{nbytes} bytes of device memory cannot be allocated: out of memory")
        self.memory_left -= nbytes
        self.made += 1
        fd = os.memfd_create("device", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        address = self._map(fd, nbytes)
        self.allocated[address] = fd
        self._made_as[address] = self.made
        return address

    def free(self, device: int, address: int) -> None:
        self.memory_left += len(self.mapped[address])
        os.close(self.allocated.pop(address))
        self.shut(device, address)

    def export(self, device: int, address: int) -> Export:
        for base, fd in self.allocated.items():
            size = len(self.mapped[base])
            if base <= address < base + size:
                handle = _HANDLE.pack(os.getpid(), id(self), fd, size) + self.identities[device]
                return Export(self._made_as[base], handle, base, size)
        raise Unreachable("other processes cannot open this device memory: set nothing_expandable")

    def open(self, device: int, handle: bytes) -> int:
        pid, driver, descriptor, size = _HANDLE.unpack_from(handle)
        # CUDA refuses it.
        assert (pid, driver) != (os.getpid(), id(self)), "a process opens its own memory"
        if handle[_HANDLE.size :] in self.out_of_reach:
            raise Unreachable(f"device {device} of this process has no access to the device of the value")
        try:
            fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"memory of the other process cannot be opened: {error}") from error
        try:
            return self._map(fd, size)
        finally:
            os.close(fd)

    def shut(self, device: int, address: int) -> None:
        self.mapped.pop(address).close()

    def stream_apart(self, device: int) -> int:
        return 2

    def copy(self, device: int, spans: Sequence[Span], stream: int) -> Event:
        for span in spans:
            self.enqueue(stream, partial(self._move, span))
        return self.record(device, stream)

    def is_idle(self, device: int, stream: int) -> bool:
        self.work()
        return self.broken is None and not self._streams.get(stream)

    def record(self, device: int, stream: int) -> Event:
        number = next(self._numbers)
        self._events[number] = False
        self.enqueue(stream, lambda: self._reach(number))
        return Event(device, number)

    def work(self) -> None:
        """Do the work of the streams, up to closed gates."""
        with self._lock:
            for queue in self._streams.values():
                while queue and not (isinstance(queue[0], Gate) and not queue[0].open):
                    work = queue.popleft()
                    if not isinstance(work, Gate):
                        work()

    def happened(self, event: Event) -> bool:
        with self._lock:
            self.work()
            if self.broken is not None and not self._events[event.number]:
                raise DeviceError(self.broken)
            return self._events[event.number]

    def wait(self, event: Event) -> None:
        for queue in self._streams.values():
            for work in queue:
                if isinstance(work, Gate):
                    work.open = True
        assert self.happened(event)

    def forget(self, event: Event) -> None:
        del self._events[event.number]

    def close(self) -> None:
        return

    def check_empty(self) -> None:
        """Nothing is left of earlier work."""
        assert not self._events, "events are left"
        assert not self.allocated, "memory is left"
        assert not self.mapped, "mappings are left"

    # A test's actions on a device.

    @property
    def current_stream(self) -> int:
        """The stream that this thread gives work to."""
        return getattr(self._here, "stream", 0)

    @current_stream.setter
    def current_stream(self, stream: int) -> None:
        self._here.stream = stream

    def enqueue(self, stream: int, work: Gate | Callable[[], object]) -> None:
        """Have a stream do something after its other work."""
        with self._lock:
            self._streams.setdefault(stream, deque()).append(work)

    def hold(self, stream: int = 0) -> Gate:
        """Let a stream get no further than here, until the gate is opened."""
        gate = Gate()
        self.enqueue(stream, gate)
        return gate

    def tensor(self, size: int, device: int = 0) -> torch.Tensor:
        """A tensor of float32 in new memory of a device."""
        import torch

        return self.bytes(size * 4, device).view(torch.float32)

    def bytes(self, nbytes: int, device: int = 0) -> torch.Tensor:
        """A tensor of bytes in new memory of a device, which is freed with the last look at it."""
        address = self.allocate(device, max(4096, nbytes))
        tensor = self.tensor_at(address, nbytes)
        weakref.finalize(tensor.untyped_storage(), self.free, device, address).atexit = False
        return tensor

    def tensor_at(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        """A tensor of bytes that looks at an address, and keeps the owner of the memory."""
        import torch

        return torch.frombuffer(view_at(address, nbytes, owner), dtype=torch.uint8)

    def _map(self, fd: int, size: int) -> int:
        region = mmap(fd, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self.mapped[address] = region
        return address

    def _reach(self, number: int) -> None:
        if number in self._events:
            self._events[number] = True

    def _move(self, span: Span) -> None:
        ctypes.memmove(*span)
        self.copied += span.nbytes


class HostAccelerators:
    """The runtime's side: tensors in the memory of a `HostDriver` count as device tensors."""

    def __init__(self, driver: HostDriver) -> None:
        self.driver = driver

    def open_driver(self) -> HostDriver:
        if not self.driver.identities:
            raise Unreachable("this process sees no device")
        return self.driver

    def device_of(self, tensor: torch.Tensor) -> int | None:
        start = tensor.untyped_storage().data_ptr()
        known = list(self.driver.mapped.items())
        return 0 if any(base <= start < base + len(region) for base, region in known) else None

    def current_stream(self, device: int) -> int:
        return self.driver.current_stream

    def current_streams(self) -> Sequence[Any]:
        return [self.driver.current_stream]

    @contextmanager
    def using(self, streams: Sequence[Any]) -> Generator[None]:
        before = self.driver.current_stream
        (self.driver.current_stream,) = streams
        try:
            yield
        finally:
            self.driver.current_stream = before

    def give_back(self, device: int) -> None:
        assert self.driver.is_apart
        self.driver.memory_left += self.driver.cached
        self.driver.cached = 0

    def land(self, identities: Sequence[bytes], source: bytes, nbytes: int) -> Landing:
        assert self.driver.is_apart
        memory = self.driver.bytes(nbytes)
        return Landing(memory, 0, memory.data_ptr(), nbytes, 7)

    def take_over(self, memory: torch.Tensor | Reading) -> torch.Tensor:
        assert self.driver.is_apart
        if isinstance(memory, Reading):
            memory.used_by(self.driver.current_stream)
            memory = self.driver.tensor_at(memory.address, memory.nbytes, memory)
        # The stream of this thread waits for that of the copy.
        self.driver.work()
        assert self.device_of(memory) == 0
        return memory

    def copy(self, memory: torch.Tensor | Reading) -> torch.Tensor:
        return self.driver.bytes(memory.nbytes).copy_(self.take_over(memory))
