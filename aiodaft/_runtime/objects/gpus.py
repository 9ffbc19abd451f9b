"""GPUs as torch sees them. Loaded when a CUDA tensor is to travel, or arrives."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aiodaft._runtime.serialization.tensors import loaded_torch
from aiodaft_transport import Unreachable
from aiodaft_transport.cuda.device import Landing
from aiodaft_transport.cuda.libcuda import CudaDriver

if TYPE_CHECKING:
    import torch


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
                stack.enter_context(_torch().cuda.stream(stream))
            yield

    def land(self, identities: Sequence[bytes], source: bytes, nbytes: int) -> Landing:
        torch = _torch()
        device = identities.index(source) if source in identities else 0
        stream = self._landing_stream(device)
        # torch reuses memory of a stream in the order of that stream, so what it gives may be written to at once.
        with torch.cuda.stream(stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        return Landing(memory, device, memory.data_ptr(), nbytes, stream.cuda_stream)

    def take_over(self, memory: torch.Tensor) -> None:
        # Else, once it is garbage, it would be given to the next value while this thread's stream still reads it.
        memory.record_stream(_torch().cuda.current_stream(memory.device))

    def copy(self, memory: torch.Tensor) -> torch.Tensor:
        self.take_over(memory)
        return memory.clone()

    def _landing_stream(self, device: int) -> Any:
        if device not in self._landing_streams:
            # Its own, so that values arrive while the methods' streams compute.
            self._landing_streams[device] = _torch().cuda.Stream(device)
        return self._landing_streams[device]


def _torch() -> ModuleType:
    try:
        import torch  # noqa: PLC0415 - optional package
    except ImportError as error:
        raise Unreachable(f"CUDA tensors need torch, which is not installed here: {error}") from error
    if not torch.cuda.is_available():
        raise Unreachable(f"torch {torch.__version__} finds no GPU in this process")
    return torch
