"""Actors that compute on a GPU as users do: compiled, in graphs of kernels, with NCCL, on streams, with collectives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import aiodaft
from aiodaft import Actor, method


def formula(x: Tensor) -> Tensor:
    return nn.functional.gelu(x * 2.0 + 1.0).sum(-1)


class Replayer(Actor):
    """Replays a CUDA graph, whose output is the same memory each time."""

    def __init__(self, size: int) -> None:
        self.x = torch.zeros(size, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # The kernels are loaded before the capture.
            self.out = self.x * 2.0 + 1.0
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.x * 2.0 + 1.0

    @method
    async def replay(self, value: float) -> Tensor:
        self.x.fill_(value)
        self.graph.replay()
        return self.out

    @method
    def replay_on_thread(self, value: float) -> Tensor:
        self.x.fill_(value)
        self.graph.replay()
        return self.out

    @method
    async def replay_with(self, x: Tensor) -> Tensor:
        """The input arrives as a value of another actor."""
        self.x.copy_(x)
        self.graph.replay()
        return self.out

    @method
    async def lend(self) -> Tensor:
        return aiodaft.borrow(self.out)


class Programmer(Actor):
    """Computes on a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        # A compiler with processes of its own takes longer to start than the little that it compiles here.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    @method
    def compiled(self, x: Tensor) -> Tensor:
        result: Tensor = torch.compile(formula)(x)
        return result

    @method
    async def make(self, size: int, value: float) -> Tensor:
        return torch.full((size,), value, device=self.device)

    @method
    async def total(self, x: Tensor) -> tuple[str, float]:
        return x.device.type, float(x.sum())

    @method
    async def grads(self, x: Tensor) -> Tensor:
        """Autograd, of a tensor that came from another process."""
        leaf = x.detach().requires_grad_()
        (leaf * leaf).sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    # On several streams.

    @method
    def on_streams(self, count: int, size: int) -> list[Tensor]:
        """Each tensor is computed by a stream of its own, for which this thread's stream waits."""
        made: list[Tensor] = []
        for number in range(count):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                made.append(torch.full((size,), float(number), device=self.device))
            torch.cuda.current_stream().wait_stream(side)
            made[-1].record_stream(torch.cuda.current_stream())
        return made

    @method
    async def totals(self, tensors: list[Tensor]) -> list[float]:
        return [float(tensor.sum()) for tensor in tensors]

    @method
    def totals_on_thread(self, tensors: list[Tensor]) -> list[float]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return [float(tensor.sum()) for tensor in tensors]

    # Values with several parts.

    @method
    async def items(self, count: int, size: int) -> AsyncGenerator[Tensor, None]:
        kept = torch.zeros(size, device=self.device)
        for _ in range(count):
            yield kept.add_(1.0)

    @method
    async def send(self, channel: aiodaft.Channel[Tensor], count: int, size: int) -> None:
        kept = torch.zeros(size, device=self.device)
        for _ in range(count):
            await channel.send(kept.add_(1.0))
        await channel.aclose()

    @method
    async def receive(self, channel: aiodaft.Channel[Tensor]) -> list[tuple[str, float]]:
        return [(item.device.type, float(item[-1])) async for item in channel]

    # Members of a group.

    @method
    async def reduce_by_name(self, size: int) -> tuple[str, float]:
        group: aiodaft.typing.CurrentGroup[Any] = aiodaft.current_group()
        x = torch.full((size,), float(group.rank + 1), device=self.device)
        total = await group.all_reduce(x)
        gathered = await group.all_gather(x)
        assert [float(part[0]) for part in gathered] == [float(rank + 1) for rank in range(group.size)]
        assert all(part.is_cuda for part in gathered)
        return total.device.type, float(total.sum())

    @method
    async def pass_round(self, size: int) -> tuple[str, float]:
        """A message to the next member, and one from the one before."""
        group: aiodaft.typing.CurrentGroup[Any] = aiodaft.current_group()
        x = torch.full((size,), float(group.rank), device=self.device)
        _, came = await asyncio.gather(
            group.send(x, to=(group.rank + 1) % group.size), group.recv(source=(group.rank - 1) % group.size)
        )
        return came.device.type, float(came[-1])

    @method
    def reduce_with_torch(self, size: int, backend: str | None, *devices: str) -> tuple[str, list[float]]:
        """The backends of the devices, and the sums of torch.distributed's results for a tensor on each of them."""
        with aiodaft.current_group().process_group(backend, patience=20):
            tensors = [torch.full((size,), float(dist.get_rank() + 1), device=device) for device in devices]
            for tensor in tensors:
                dist.all_reduce(tensor)
            return dist.get_backend_config(), [float(tensor.sum()) for tensor in tensors]
