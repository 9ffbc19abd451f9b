"""The subjects of the GPU benchmark, on a GPU that is memory of the host."""

from __future__ import annotations

from typing import ClassVar

from host_devices import use_host_devices
from torch import Tensor

from aiodaft import method
from benchmarks.gpu_actors import GpuHolder


class HostHolder(GpuHolder):
    """Torch's own processes have memory of the host as well."""

    device: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.driver = use_host_devices(0)

    @method
    async def gpu(self) -> tuple[str, int]:
        return "memory of the host", 1 << 30

    def _new(self, size: int) -> Tensor:
        return self.driver.bytes(size)

    def _wait(self) -> None:
        """The processor's copies are done at once."""
