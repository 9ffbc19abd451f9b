"""Values on accelerators: lent or copied within the device's memory, so that peers can read them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from aiodaft._runtime.serialization.encoded import Encoded, loaded_torch
from aiodaft.exceptions import ResourceExhausted
from aiodaft_transport import Grant, OutOfDeviceMemory, Unreachable
from aiodaft_transport.cuda.device import DeviceBlock, DeviceHost, Driver, Landing, Span
from aiodaft_transport.cuda.libcuda import CudaDriver
from aiodaft_transport.cuda.transport import CudaTransport, Reading

if TYPE_CHECKING:
    import torch

    from aiodaft._runtime.connections.route import Route


class Accelerators(Protocol):
    """A kind of accelerator, as the tensor library sees it. Devices have the numbers that the driver gives them."""

    def open_driver(self) -> Driver:
        """Open their driver.

        Raises:
            Unreachable: This process has none.
        """
        ...

    def device_of(self, tensor: torch.Tensor) -> int | None: ...

    def current_stream(self, device: int) -> int: ...

    def current_streams(self) -> Sequence[Any]: ...

    def using(self, streams: Sequence[Any]) -> AbstractContextManager[object]: ...

    def give_back(self, device: int) -> None:
        """Give memory back to the device that the tensor library keeps for later. May wait for the device."""
        ...

    def land(self, identities: Sequence[bytes], source: bytes, nbytes: int) -> Landing:
        """Memory for bytes that come from the device `source`: on that device if it is here."""
        ...

    def take_over(self, memory: Any) -> torch.Tensor:
        """Memory that has landed, or is read in place, as a tensor of bytes that this thread begins to use."""
        ...

    def copy(self, memory: Any) -> Any: ...


class Devices:
    """The accelerators of one process."""

    def __init__(self, kind: Accelerators, host: DeviceHost, local: str, streams: Callable[[], Any]) -> None:
        self.kind = kind
        self._streams = streams
        self.transport = CudaTransport(host, kind.open_driver, self._land, local=local)

    def take(self, encoded: Encoded) -> list[DeviceBlock]:
        """Make the buffers of a value that are on devices readable for peers, as they are now, without waiting.

        A lent buffer gets a block of its own. The rest is copied, after the work that this thread's streams have and
        before any later write.

        Returns:
            A block for each device that has buffers of the value which are not lent.

        Raises:
            ResourceExhausted: A device has no memory for the copy.
            DeviceError: A device failed.
            Unreachable: The memory cannot be lent.
        """
        lent: list[DeviceBlock] = []
        taken: list[DeviceBlock] = []
        try:
            for source in encoded.sources:
                if source.device is not None and source.lent:
                    stream, keep = self.kind.current_stream(source.device), source.keep
                    block = self.transport.lend(source.device, source.address, source.nbytes, stream, keep)
                    source.block = block
                    lent.append(block)
            for device, nbytes in encoded.device_nbytes.items():
                taken.append(self._capture(encoded, device, nbytes))
        except BaseException:
            for block in (*taken, *lent):
                block.release()
            raise
        return taken

    def grant(self, block: DeviceBlock, route: Route) -> tuple[Any, Grant]:
        """Grant a filled block: from device to device on one machine, else through host memory. With the transport.

        Raises:
            DeviceError: The device failed before it had filled the block.
        """
        if route.shares_memory:
            return self.transport, self.transport.grant(block, route)
        transport = self._streams()
        return transport, transport.grant(self.transport.through_host(block), route)

    def memory_in(self, target: torch.Tensor, device: int, grant: Grant, connection: Route) -> Landing | None:
        if self.transport.device_of(grant, connection) != device:
            return None
        return Landing(target, device, target.data_ptr(), target.nbytes, self.kind.current_stream(device))

    def _capture(self, encoded: Encoded, device: int, nbytes: int) -> DeviceBlock:
        spans: list[Span] = []
        originals: list[Any] = []
        for source, offset in zip(encoded.sources, encoded.offsets, strict=True):
            if source.device == device and not source.is_apart:
                spans.append(Span(offset, source.address, source.nbytes))
                originals.append(source.keep)
                # From now on, a write to the tensor comes after the copy.
                source.keep = source.version = None
        capture = partial(self.transport.capture, device, spans, nbytes, self.kind.current_stream(device), originals)
        with suppress(OutOfDeviceMemory):
            return capture()
        with self.transport.driver.apart():
            self.kind.give_back(device)
        try:
            return capture()
        except OutOfDeviceMemory as error:
            raise ResourceExhausted(
                f"{error}: free memory of the GPU, or send a tensor without a copy, with aiodaft.borrow()"
            ) from error

    def _land(self, source: bytes, nbytes: int) -> Landing:
        driver = self.transport.driver
        with driver.apart():
            return self.kind.land(driver.identities, source, nbytes)

    def take_over(self, memory: Any) -> torch.Tensor:
        with self.transport.driver.apart():
            return self.kind.take_over(memory)

    def copy(self, memory: Any) -> Any:
        with self.transport.driver.apart():
            return self.kind.copy(memory)


class Gpus:
    """The GPUs of this process. torch numbers them as the driver does."""

    def __init__(self) -> None:
        self._landing_streams: dict[int, Any] = {}

    def open_driver(self) -> CudaDriver:
        return CudaDriver()

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.device.index if tensor.is_cuda else None

    def current_stream(self, device: int) -> int:
        return int(_torch().cuda.current_stream(device).cuda_stream)

    def current_streams(self) -> Sequence[Any]:
        torch = loaded_torch()
        if torch is None or not torch.cuda.is_initialized():
            return ()
        return [torch.cuda.current_stream(device) for device in range(torch.cuda.device_count())]

    @contextmanager
    def using(self, streams: Sequence[Any]) -> Generator[None]:
        with ExitStack() as stack:
            for stream in streams:
                # The default one, number 0, is the current one already. And to make a stream current, torch makes its
                # device current: without a context there, it would get one, which takes half a GiB.
                if stream.cuda_stream:
                    stack.enter_context(_torch().cuda.stream(stream))
            yield

    def give_back(self, device: int) -> None:
        torch = _torch()
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

    def land(self, identities: Sequence[bytes], source: bytes, nbytes: int) -> Landing:
        torch = _torch()
        device = identities.index(source) if source in identities else 0
        stream = self._landing_stream(device)
        # torch reuses the memory of a stream in the order of the stream, so it may be written to at once.
        with torch.cuda.stream(stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        return Landing(memory, device, memory.data_ptr(), nbytes, stream.cuda_stream)

    def take_over(self, memory: torch.Tensor | Reading) -> torch.Tensor:
        library = _torch()
        # Else the memory would be reused, once it is garbage, while this thread's stream still reads it.
        if isinstance(memory, Reading):
            memory.used_by(self.current_stream(memory.device))
            tensor: torch.Tensor = library.as_tensor(memory, device=f"cuda:{memory.device}")
            return tensor
        stream = library.cuda.current_stream(memory.device)
        memory.record_stream(stream)
        # The copy into it may still be under way.
        stream.wait_stream(self._landing_stream(memory.device.index))
        return memory

    def copy(self, memory: torch.Tensor | Reading) -> torch.Tensor:
        return self.take_over(memory).clone()

    def _landing_stream(self, device: int) -> Any:
        stream = self._landing_streams.get(device)
        if stream is None:
            # A stream of its own, so that values arrive while those of the methods compute. Two threads may come here
            # at the same time: the thread that takes a value over has to wait for the stream that it lands on.
            stream = self._landing_streams.setdefault(device, _torch().cuda.Stream(device))
        return stream


@cache
def _torch() -> ModuleType:
    try:
        import torch  # noqa: PLC0415 - optional package
    except ImportError as error:
        raise Unreachable(f"CUDA tensors need torch, which is not installed here: {error}") from error
    if not torch.cuda.is_available():
        raise Unreachable(f"torch {torch.__version__} finds no GPU in this process")
    return torch
