"""Members of groups that run programs of torch.distributed."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import aiodaft

STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 8, dtype=torch.double), torch.randn(12, 1, dtype=torch.double)


def train(trained: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(trained(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


class Rank(aiodaft.Actor):
    def __init__(self) -> None:
        self.inside = threading.Event()

    @aiodaft.method
    def sum_ranks(self) -> float:
        with aiodaft.current_group().process_group("gloo"):
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total)
            return total.item()

    @aiodaft.method
    def variables(self) -> tuple[dict[str, str], dict[str, str], bool]:
        """Those of torchrun, in the block and after it, and whether there is a process group then."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        with aiodaft.current_group().process_group("gloo"):
            inside = {name: os.environ[name] for name in names}
        return inside, {name: os.environ[name] for name in names if name in os.environ}, dist.is_initialized()

    @aiodaft.method
    def train_ddp(self) -> list[float]:
        """The mean losses of the parts of the batch."""
        from torch.nn.parallel import DistributedDataParallel

        group: aiodaft.CurrentGroup[Any] = aiodaft.current_group()
        with group.process_group("gloo"):
            x, y = (part.chunk(group.size)[group.rank] for part in batch())
            losses = torch.tensor(train(DistributedDataParallel(model()), x, y), dtype=torch.double)
            dist.all_reduce(losses)
            return list((losses / group.size).tolist())

    @aiodaft.method
    def train_fsdp(self) -> list[float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        group: aiodaft.CurrentGroup[Any] = aiodaft.current_group()
        with group.process_group("gloo"):
            sharded = model()
            fully_shard(sharded, mesh=init_device_mesh("cpu", (group.size,)))
            x, y = (part.chunk(group.size)[group.rank] for part in batch())
            losses = torch.tensor(train(sharded, x, y), dtype=torch.double)
            dist.all_reduce(losses)
            return list((losses / group.size).tolist())

    @aiodaft.method
    def wait_for_each_other(self, dies: int) -> None:
        """Each waits for the one before it, the first one for the last one, which dies."""
        group: aiodaft.CurrentGroup[Any] = aiodaft.current_group()
        with group.process_group("gloo"):
            received = torch.zeros(1)
            dist.all_reduce(received)
            if group.rank == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            # Nobody sends: those that wait for one that lives wait, too.
            dist.recv(received, (group.rank + 1) % group.size)

    @aiodaft.method
    def fail(self, fails: int) -> None:
        group: aiodaft.CurrentGroup[Any] = aiodaft.current_group()
        with group.process_group("gloo"):
            if group.rank == fails:
                raise ValueError("a bad batch")
            dist.all_reduce(torch.zeros(1))

    @aiodaft.method
    def come(self, patience: float) -> None:
        with aiodaft.current_group().process_group("gloo", patience=patience):
            pass

    @aiodaft.method
    def die_first(self, dies: int) -> None:
        if aiodaft.current_group().rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.come_now()

    def come_now(self) -> None:
        with aiodaft.current_group().process_group("gloo"):
            pass

    @aiodaft.method
    async def come_on_the_loop(self) -> None:
        with aiodaft.current_group().process_group("gloo"):
            pass

    @aiodaft.method
    def come_twice(self) -> None:
        with aiodaft.current_group().process_group("gloo"), aiodaft.current_group().process_group("gloo"):
            pass

    @aiodaft.method
    def come_over(self, interface: str) -> None:
        with aiodaft.current_group().process_group("gloo", interface=interface):
            pass
