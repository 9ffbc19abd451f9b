"""Actors with tensors on a GPU, and their floors: copies within its memory, and CUDA IPC of torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from aiodaft.actor import Actor
from aiodaft.methods import method
from aiodaft.reading import borrow, read_only

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch


class GpuHolder(Actor):
    """Makes and takes tensors on the first GPU. Tests have a subclass whose GPU is memory of the host."""

    device: ClassVar[str] = "cuda:0"

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    @method
    async def gpu(self) -> tuple[str, int]:
        """The name of the GPU and the bytes that are free there, once it is in use; "" and 0 if there is none."""
        import torch  # noqa: PLC0415 - optional package

        if not torch.cuda.is_available():
            return "", 0
        return torch.cuda.get_device_name(self.device), torch.cuda.mem_get_info(self.device)[0]

    @method
    async def fresh(self, size: int) -> torch.Tensor:
        """A tensor of its own each time, in whose making the GPU has no work."""
        return self._new(size)

    @method
    async def kept(self, size: int) -> torch.Tensor:
        """The same one each time, which may be written to later."""
        return self._keep("given", size)

    @method
    async def lent(self, size: int) -> torch.Tensor:
        """The same one each time, lent."""
        return borrow(self._keep("given", size))

    @method(transport="shm")
    async def by_host(self, size: int) -> torch.Tensor:
        """One that goes through memory of the host."""
        return self._new(size)

    @method
    async def of_host(self, size: int) -> torch.Tensor:
        """A tensor in memory of the host."""
        import torch  # noqa: PLC0415 - optional package

        return torch.empty(size, dtype=torch.uint8)

    @method
    async def number(self, size: int) -> int:
        """An integer."""
        return size

    @method
    async def take(self, value: Any) -> int:
        """The size of a tensor, or a number; the GPU has no work with it."""
        return value if isinstance(value, int) else len(value)

    @method
    @read_only
    async def look(self, value: torch.Tensor) -> int:
        """The same of a tensor that is only read."""
        return len(value)

    @method
    def copies(self, size: int, repeats: int, in_flight: int) -> float:
        """Seconds that a copy within the memory of the GPU takes, of so many that are begun at once."""
        source, target = self._keep("source", size), self._keep("target", size)
        self._wait()
        start = time.perf_counter()
        for _ in range(repeats):
            for _ in range(in_flight):
                target.copy_(source)
            self._wait()
        return (time.perf_counter() - start) / (repeats * in_flight)

    def _keep(self, name: str, size: int) -> torch.Tensor:
        """The tensor with a name and a size."""
        if (name, size) not in self._kept:
            self._kept[name, size] = self._new(size)
        return self._kept[name, size]

    def _new(self, size: int) -> torch.Tensor:
        import torch  # noqa: PLC0415 - optional package

        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _wait(self) -> None:
        import torch  # noqa: PLC0415 - optional package

        torch.cuda.synchronize(self.device)


class TorchIpc(Actor):
    """Sends tensors to another process with torch.multiprocessing. That process ends with this actor's."""

    def __init__(self, device: str) -> None:
        from torch import multiprocessing  # noqa: PLC0415 - optional package

        self._device = device
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._other = context.Process(target=receive, args=(far, device), daemon=True)
        self._other.start()
        # The other process has the only other end: the end of either process is seen by the other one.
        far.close()

    @method
    def send(self, size: int, repeats: int, in_flight: int, clone: bool) -> float:
        """Seconds until the other process has a tensor, of so many that are sent at once.

        Raises:
            EOFError, OSError: The other process has ended.
        """
        import torch  # noqa: PLC0415 - optional package

        self._pipe.send((repeats, in_flight, clone))
        start = time.perf_counter()
        for _ in range(repeats):
            for _ in range(in_flight):
                self._pipe.send(torch.empty(size, dtype=torch.uint8, device=self._device))
            self._pipe.recv()
        return (time.perf_counter() - start) / (repeats * in_flight)

    @method
    def end(self) -> None:
        """End the other process."""
        self._pipe.close()
        self._other.join()


def receive(pipe: Connection, device: str) -> None:
    """The other process: take the tensors, clone them if that is asked for, and answer when all of them are here."""
    import torch  # noqa: PLC0415 - optional package

    try:
        while True:
            repeats, in_flight, clone = pipe.recv()
            for _ in range(repeats):
                for _ in range(in_flight):
                    tensor = pipe.recv()
                    if clone:
                        tensor = tensor.clone()
                    del tensor
                if clone and device != "cpu":
                    torch.cuda.synchronize(device)
                pipe.send(in_flight)
    except (EOFError, KeyboardInterrupt):
        # The actor's process has ended, or all of the program does.
        return
