"""Actors with tensors on a GPU."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from actors import Box
from here import current_peer
from tensor_keepers import TensorKeeper
from torch import Tensor

import aiodaft
from aiodaft import method
from aiodaft.memory import read_only

# About a second of a GPU's time.
LONG = 1_500_000_000


class GpuKeeper(TensorKeeper):
    """Makes, keeps and changes tensors on one GPU."""

    def __init__(self, device: int = 0, *, expandable: bool = False) -> None:
        if expandable:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        self.peer = current_peer()
        self.device = torch.device("cuda", device)
        self.tensor = torch.zeros(0, device=self.device)
        self.side = torch.cuda.Stream(self.device)
        self.profiler: Any = None

    def _make(self, size: int, value: float) -> Tensor:
        self.tensor = torch.full((size,), value, device=self.device)
        return self.tensor

    def _make_late(self, size: int, value: float) -> Tensor:
        tensor = self._make(size, 0.0)
        torch.cuda._sleep(LONG)
        return tensor.fill_(value)

    @method
    def make_late(self, size: int, value: float) -> Tensor:
        """Its result is computed after a second."""
        return self._make_late(size, value)

    @method
    def make_on_side_stream(self, size: int, value: float) -> Tensor:
        """The same on a stream of its own, which this thread goes on to use."""
        torch.cuda.set_stream(self.side)
        return self._make_late(size, value)

    @method
    def overwrite(self, value: float) -> None:
        """In the order of the stream of the thread; does not wait."""
        self.tensor.fill_(value)

    @method
    async def make_on(self, device: int, size: int) -> Tensor:
        return torch.zeros(size, device=torch.device("cuda", device))

    @method
    async def make_pinned(self, size: int, value: float) -> Tensor:
        """Memory of the host that the GPU can reach."""
        self.tensor = torch.full((size,), value, pin_memory=True)
        return self.tensor

    @method
    async def lend_again(self) -> Tensor:
        return aiodaft.borrow(self.tensor)

    @method
    async def lend_part(self, size: int, value: float, start: int, stop: int) -> Tensor:
        return aiodaft.borrow(self._make(size, value)[start:stop])

    @method
    async def several(self, size: int) -> list[Any]:
        base = self._make(size, 1.0)
        parameter = torch.nn.Parameter(torch.ones(size, device=self.device))
        return [torch.full((size,), 3.0), base, base[10:20], base[::2].clone()[::2], base[:0], parameter]

    @method
    async def where(self, tensor: Tensor) -> tuple[str, str, float]:
        """The kind of device that a tensor is on here, the id of the device, and the sum of the tensor."""
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid) if tensor.is_cuda else ""
        return tensor.device.type, uuid, float(tensor.sum())

    @method
    @read_only
    async def peek(self, tensor: Tensor) -> tuple[float, int]:
        """The sum of a tensor that is not copied for this, and the most memory that torch has had in the meantime."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        total = float(tensor.sum())
        return total, torch.cuda.max_memory_allocated(self.device) - before

    @method
    @read_only
    def peek_late(self, tensor: Tensor) -> None:
        """Have the GPU read a tensor after a second, and drop it at once."""
        torch.cuda._sleep(LONG)
        self.tensor = tensor.sum()

    @method
    @read_only
    async def hold_on(self, tensor: Tensor) -> None:
        """Keep a part of it."""
        self.tensor = tensor[1:]

    @method
    def let_go(self) -> float:
        """The first element of the kept tensor, which is dropped."""
        first = float(self.tensor.view(-1)[0])
        self.tensor = torch.zeros(0, device=self.device)
        return first

    @method
    @read_only
    def break_promise(self, tensor: Tensor) -> None:
        tensor.add_(1.0)

    @method
    def add_in_place(self, tensor: Tensor, value: float) -> float:
        tensor.add_(value)
        return float(tensor[0])

    @method
    def to_gpu(self, value: Any) -> Any:
        """Tensors, put on the GPU with their strides."""
        return [tensor.to(self.device) for tensor in value]

    @method
    def churn(self, count: int) -> None:
        """Have the caching allocator give memory away again and again, with something else in it."""
        for _ in range(count):
            torch.full((1 << 18,), -1.0, device=self.device)

    @method
    def capture_graph(self, rounds: int) -> float:
        """Capture a graph, in the mode that forbids other threads nearly everything, and replay it."""
        # The kernel is loaded before the capture.
        x = torch.zeros(1 << 16, device=self.device).add_(0.0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                x.add_(1.0)
        graph.replay()
        return float(x[0])

    @method
    def start_trace(self) -> None:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.profiler.__enter__()

    @method
    def stop_trace(self) -> list[str]:
        """Names of the GPU's operations since."""
        torch.cuda.synchronize()
        self.profiler.__exit__(None, None, None)
        return [event.name for event in self.profiler.events()]

    @method(ordered=False)
    async def traffic(self) -> tuple[int, int]:
        """Bytes of payload sent, and those of them from GPU to GPU."""
        traffic = self.peer.connections.traffic()
        return traffic.payload_sent, traffic.device_sent

    @method
    async def take_behind(self, box: Box, size: int) -> float:
        """Have a value written into a tensor behind a second of other work of the same stream."""
        target = torch.zeros(size, device=self.device)
        torch.cuda._sleep(LONG)
        await box.ref.into(target)
        return float(target.sum())

    @method
    async def pulls(self) -> int:
        """The number of copies from other processes that the GPU was told to make, and has not reported as made."""
        remotes = self.peer.store.devices.transport.remotes.values()
        return sum(pull.event is not None for remote in remotes for pull in remote.pulls)

    @method
    async def blocks(self) -> int:
        gc.collect()
        return self.peer.store.devices.transport.live_blocks()

    @method(ordered=False)
    async def die(self) -> None:
        os.abort()
