"""Members of groups that run programs of torch.distributed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from inside import connect_to_stores_within, end_blocks_that_stand_still
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transport_probes import no_more_files

import aiodaft
from aiodaft._runtime.groups.blocks import Blocks
from aiodaft._runtime.process import current_process

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


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str, trained: nn.Module) -> None:
    """Have this process die at a point of its next block, in which it trains a model."""
    match point:
        case "come":
            die()
        case "init":
            dist.init_process_group = die
        case "connect":
            dist.init_process_group = partial(init_and_die, dist.init_process_group)
        case "forward":
            trained.register_forward_hook(die)
        case "backward":
            next(trained.parameters()).register_hook(die)
        case "destroy":
            dist.destroy_process_group = die


class LastStore(dist.Store):
    """A store for the address of this process, which dies then."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        die()


def init_and_die(init: Callable[..., None], backend: str, *, store: dist.Store, **options: Any) -> None:
    """Die when the others know where to connect, and nobody has."""
    init(backend, store=LastStore(store), **options)


class SlowStores:
    """Stores of torch, which take some seconds to connect, with any timeout: an answer about a name."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._make = dist.TCPStore
        self.attempts = 0

    def __call__(self, *args: Any, timeout: timedelta = timedelta.max, **options: Any) -> dist.Store:
        self.attempts += 1
        threading.Event().wait(self._seconds)
        if timeout.total_seconds() < self._seconds:
            raise dist.DistNetworkError("the client socket has timed out")
        return self._make(*args, **options)


class Rank(aiodaft.Actor):
    def __init__(self) -> None:
        self.inside = threading.Event()
        self.kept = ExitStack()
        self.first_group: aiodaft.typing.CurrentGroup[Any] | None = None

    @aiodaft.method
    async def epoch(self) -> int:
        """That which this member knows."""
        return aiodaft.current_group().epoch

    @aiodaft.method
    def come_in_first_group(self) -> None:
        """To a block of the group as it was at the first call."""
        self.first_group = self.first_group or aiodaft.current_group()
        with self.first_group.process_group("gloo"):
            pass

    @aiodaft.method
    def sum_ranks(self) -> float:
        with aiodaft.current_group().process_group("gloo"):
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total)
            return total.item()

    @aiodaft.method
    def keep(self) -> None:
        """Enter a block that other calls use, too."""
        self.kept.enter_context(aiodaft.current_group().process_group("gloo"))

    @aiodaft.method
    def sum_in_kept(self) -> float:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    @aiodaft.method
    def leave_kept(self) -> bool:
        self.kept.close()
        return "RANK" in os.environ or dist.is_initialized()

    @aiodaft.method
    def sum_unless(self, fails: bool) -> float:
        """Fail before it comes to the block."""
        if fails:
            raise ValueError("a bad batch")
        return self.sum_ranks()

    @aiodaft.method
    def variables(self) -> tuple[dict[str, str], dict[str, str], bool]:
        """Those of torchrun, in the block and after it, and whether there is a process group then."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        with aiodaft.current_group().process_group("gloo"):
            inside = {name: os.environ[name] for name in names}
        return inside, {name: os.environ[name] for name in names if name in os.environ}, dist.is_initialized()

    @aiodaft.method
    def connect_slowly(self) -> int:
        """The attempts to connect to the store, each of which takes a hundred times as long as the first one may."""
        connect_to_stores_within(0.001)
        stores = dist.TCPStore = SlowStores(0.1)
        self.sum_ranks()
        return stores.attempts

    @aiodaft.method
    def connect_over_another_network(self) -> None:
        """To the store, which is at 127.0.0.1."""
        with aiodaft.current_group().process_group("gloo"):
            socket.create_connection(("127.0.0.2", int(os.environ["MASTER_PORT"]))).close()

    @aiodaft.method
    def train_ddp(self) -> list[float]:
        """The mean losses of the parts of the batch."""
        group: aiodaft.typing.CurrentGroup[Any] = aiodaft.current_group()
        with group.process_group("gloo"):
            x, y = (part.chunk(group.size)[group.rank] for part in batch())
            losses = torch.tensor(train(DistributedDataParallel(model()), x, y), dtype=torch.double)
            dist.all_reduce(losses)
            return list((losses / group.size).tolist())

    @aiodaft.method
    def train_fsdp(self) -> list[float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        group: aiodaft.typing.CurrentGroup[Any] = aiodaft.current_group()
        with group.process_group("gloo"):
            sharded = model()
            fully_shard(sharded, mesh=init_device_mesh("cpu", (group.size,)))
            x, y = (part.chunk(group.size)[group.rank] for part in batch())
            losses = torch.tensor(train(sharded, x, y), dtype=torch.double)
            dist.all_reduce(losses)
            return list((losses / group.size).tolist())

    @aiodaft.method
    def multiply_dtensors(self) -> bool:
        """On a mesh of 2 x 2: whether the product is that of one process, and a part of the mesh is a group."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor

        with aiodaft.current_group().process_group("gloo"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            x, y = torch.arange(12.0).reshape(4, 3), torch.arange(15.0).reshape(3, 5)
            product = distribute_tensor(x, mesh["tp"], [Shard(0)]) @ distribute_tensor(y, mesh["tp"], [Shard(1)])
            assert isinstance(product, DTensor)
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total, group=mesh.get_group("dp"))
            return torch.equal(product.full_tensor(), x @ y) and total.item() == sum(mesh["dp"].mesh.tolist())

    @aiodaft.method
    def train_and_die(self, point: str, dies: int) -> None:
        """Train; a member dies at a point of that."""
        group: aiodaft.typing.CurrentGroup[Any] = aiodaft.current_group()
        trained = model()
        if group.rank == dies:
            die_at(point, trained)
        with group.process_group("gloo"):
            train(DistributedDataParallel(trained), *batch())
            if point == "recv":
                # Nobody sends: each waits for the next one, the last one for the first one.
                if group.rank == dies:
                    die()
                dist.recv(torch.zeros(1), (group.rank + 1) % group.size)

    @aiodaft.method
    def wait_for_nobody(self) -> None:
        """Wait in torch for a message that no connection brings."""
        end_blocks_that_stand_still(looks=2)
        with aiodaft.current_group().process_group("gloo"):
            self.inside.set()
            torch.futures.Future[int]().wait()

    @aiodaft.method
    async def wait_inside(self) -> None:
        await asyncio.to_thread(self.inside.wait)

    @aiodaft.method
    def fail_while_the_loop_is_held(self, fails: int) -> None:
        """One member is out of the block before its loop can do anything for the others."""
        # torch asks for the names of addresses when it logs, which takes seconds where no server of names answers.
        end_blocks_that_stand_still(looks=200)
        group: aiodaft.typing.CurrentGroup[Any] = aiodaft.current_group()
        out = threading.Event()
        try:
            with group.process_group("gloo"):
                if group.rank == fails:
                    current_process().call_soon(out.wait)
                    raise ValueError("a bad batch")
                dist.recv(torch.zeros(1), fails)
        finally:
            out.set()

    @aiodaft.method
    def fail(self, fails: int) -> None:
        group: aiodaft.typing.CurrentGroup[Any] = aiodaft.current_group()
        with group.process_group("gloo"):
            if group.rank == fails:
                # The group cannot be destroyed while this is under way.
                dist.all_reduce(torch.zeros(1), async_op=True)
                raise ValueError("a bad batch")
            dist.recv(torch.zeros(1), fails)

    @aiodaft.method
    async def gatherings(self) -> int:
        """The number of blocks that members wait for at this one."""
        return current_process().part(Blocks).gatherings

    @aiodaft.method
    def come(self, patience: float | None) -> None:
        """To a block; not without patience."""
        if patience is None:
            return
        with aiodaft.current_group().process_group("gloo", patience=patience):
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
    def come_without_descriptors(self, left: int) -> None:
        with no_more_files(left):
            self.sum_ranks()

    @aiodaft.method
    def come_over(self, interface: str) -> None:
        with aiodaft.current_group().process_group("gloo", interface=interface):
            pass
