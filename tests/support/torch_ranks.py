"""Members of groups that use the process group of aiodaft."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint
from spmd_actors import batch, model, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import aiodaft
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import current_process

# Not all names have types.
dist: Any = torch.distributed
checkpoint: Any = torch.distributed.checkpoint


def mean_losses(trained: Any, part: int, parts: int) -> list[float]:
    """The losses of ranks of which each has a part of the batch."""
    x, y = (whole.chunk(parts)[part] for whole in batch())
    losses = torch.tensor(train(trained, x, y), dtype=torch.double)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return list(losses.tolist())


class TorchRank(aiodaft.Actor):
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.kept = ExitStack()
        self.inside = threading.Event()

    @aiodaft.method
    def open(self, backend: str = "aiodaft") -> tuple[str, int, set[str]]:
        """Keep a process group for other calls; its backend, its size, and the variables of an address."""
        group = self.kept.enter_context(aiodaft.current_group().process_group(backend))
        return dist.get_backend(), group.size(), {"MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()

    @aiodaft.method
    async def epoch(self) -> int:
        """That which this member knows."""
        return aiodaft.current_group().epoch

    @aiodaft.method
    def close(self) -> bool:
        self.kept.close()
        return dist.is_initialized()

    @aiodaft.method
    def script(self, path: str) -> Any:
        return runpy.run_path(path, run_name="__main__")["found"]

    @aiodaft.method
    def replicated(self) -> list[float]:
        return mean_losses(DistributedDataParallel(model()), dist.get_rank(), dist.get_world_size())

    @aiodaft.method
    def sharded(self) -> list[float]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return mean_losses(fully_shard(model(), mesh=mesh), dist.get_rank(), dist.get_world_size())

    @aiodaft.method
    def sharded_in_two_ways(self) -> list[float]:
        """FSDP2 over dp, and tensor parallelism over tp."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        trained = parallelize_module(model(), mesh["tp"], plan)
        return mean_losses(fully_shard(trained, mesh=mesh["dp"]), mesh["dp"].get_local_rank(), 2)

    @aiodaft.method
    def sent_meanwhile(self, nbytes: int) -> int:
        """The fewest messages of this process while operations are repeated: at first it hears of what was before."""
        connections, counts = current_process().part(Peer).connections, list[int]()
        whole, part = torch.ones(2, nbytes // 8), torch.ones(nbytes // 8)
        for _ in range(9):
            before = connections.traffic()
            for _ in range(3):
                dist.all_reduce(whole)
                dist.reduce_scatter_tensor(part, whole)
                dist.all_gather_into_tensor(whole, part)
            after = connections.traffic()
            counts.append(after.control_sent + after.payload_sent - before.control_sent - before.payload_sent)
        return min(counts)

    @aiodaft.method
    def waited_for_by_nobody(self, nbytes: int) -> list[float]:
        """Rank 1 sends when it has the results of operations that rank 0 has begun and does not wait for."""
        values, got = [torch.ones(nbytes // 4) for _ in range(3)], torch.zeros(1)
        works = [dist.all_reduce(value, async_op=True) for value in values]
        if dist.get_rank() == 0:
            dist.recv(got, 1)
        else:
            for work in works:
                work.wait()
            dist.send(values[2][:1], 0)
        for work in works:
            work.wait()
        return [value[-1].item() for value in (*values, got)]

    @aiodaft.method
    def in_stages(self) -> list[float]:
        """The losses of a pipeline of layers, in four microbatches; of the last stage."""
        rank, size = dist.get_rank(), dist.get_world_size()
        x, y = batch()
        layer = model()[:2] if rank == 0 else model()[2]
        stage = PipelineStage(layer, rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        return [loss.item() for loss in losses]

    @aiodaft.method
    def saved_and_loaded(self, folder: str) -> bool:
        """A checkpoint of a sharded tensor, also one that is saved in another thread, is loaded with other shards."""
        mesh = DeviceMesh("cpu", range(dist.get_world_size()))
        whole = torch.arange(35.0).view(7, 5)
        checkpoint.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=f"{folder}/now")
        saving = checkpoint.async_save(
            {"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=f"{folder}/soon"
        )
        saving.result()
        found = []
        for name in ("now", "soon"):
            state = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])}
            checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
            found.append(state["w"].full_tensor())
        return all(torch.equal(one, whole) for one in found)

    @aiodaft.method
    def collected(self) -> dict[str, Any]:
        """Each operation of torch.distributed, and what it gives."""
        rank, size = dist.get_rank(), dist.get_world_size()
        mine, found = torch.full((2,), float(rank)), dict[str, Any]()
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            total = mine + 1
            dist.all_reduce(total, op)
            found[str(op)] = total.tolist()
        bits = torch.tensor(1 << rank)
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        parts = [torch.zeros(1) for _ in range(size)]
        dist.reduce_scatter(parts[0], [torch.full((1,), rank + 10.0 * part) for part in range(size)])
        gathered = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(gathered, mine)
        rows = torch.zeros(size * (rank + 1))
        dist.all_to_all_single(
            rows, torch.full((sum(range(size + 1)),), float(rank)), [rank + 1] * size, list(range(1, size + 1))
        )
        sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size,))
        dist.all_reduce(sparse)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        doubled = functional.all_reduce(mine, "sum", dist.group.WORLD) * 2
        return found | {
            "BOR": bits.item(),
            "reduce_scatter": parts[0].item(),
            "all_gather": torch.stack(gathered)[:, 0].tolist(),
            "all_to_all": rows.tolist(),
            "objects": [one["rank"] for one in objects],
            "functional": doubled.tolist(),
            "sparse": sparse.to_dense().tolist(),
        }

    @aiodaft.method
    def together(self) -> list[float]:
        """Operations under one handle, messages in both directions, and a part of the ranks in its own order."""
        rank, size = dist.get_rank(), dist.get_world_size()
        a, b, c = torch.ones(2), torch.full((3,), 2.0), torch.zeros(1)
        with dist._coalescing_manager(async_ops=True) as handle:  # noqa: SLF001 - FSDP1 uses it
            dist.all_reduce(a)
            dist.all_reduce(b)
        handle.wait()
        ops = [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % size),
            dist.P2POp(dist.irecv, c, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        ends = dist.new_group([0, size - 1])
        d = torch.tensor([float(rank)])
        if rank in (0, size - 1):
            dist.all_reduce(d, group=ends)
        return [a[0].item(), b[0].item(), c.item(), d.item()]

    @aiodaft.method
    def in_threads(self) -> list[float]:
        """An operation in a thread without a context, and one that waits for the future of another one."""

        def add() -> float:
            total = torch.ones(1)
            dist.all_reduce(total)
            return total.item()

        def again(future: torch.futures.Future[list[Tensor]]) -> float:
            (total,) = future.value()
            return dist.all_reduce(total, async_op=True).get_future().wait()[0].item()

        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(add).result()
        return [first, dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again).wait()]

    @aiodaft.method
    def reuse(self, nbytes: int) -> int:
        """Write to a tensor as soon as each operation is over; the rounds in which another member has seen that."""
        rank, size = dist.get_rank(), dist.get_world_size()
        x, wrong = torch.zeros(nbytes // 4), 0
        outs = [torch.empty_like(x) for _ in range(size)]
        for turn in range(20):
            x.fill_(turn + rank)
            dist.all_gather(outs, x)
            x.fill_(-1.0)
            wrong += any(bool((out != turn + other).any()) for other, out in enumerate(outs))
            x.fill_(turn if rank == 0 else -1.0)
            dist.broadcast(x, 0)
            wrong += bool((x != turn).any())
        return wrong

    @aiodaft.method
    def reduce_shape(self, *shape: int) -> None:
        dist.all_reduce(torch.zeros(shape))

    @aiodaft.method
    def use_meta(self) -> None:
        dist.all_reduce(torch.zeros(1, device="meta"))

    @aiodaft.method
    def use_gloo_beside(self) -> None:
        dist.new_group(backend="gloo")

    @aiodaft.method
    def stay_behind(self, operation: str) -> None:
        """All but rank 0 do something more in the block."""
        with aiodaft.current_group().process_group("aiodaft"):
            some = dist.new_group([0, 1])
            value = torch.ones(2)
            if operation == "barrier" and dist.get_rank():
                dist.barrier()
            elif operation == "all_gather" and dist.get_rank():
                dist.all_gather([torch.empty(2) for _ in range(dist.get_world_size())], value)
            elif operation == "all_reduce" and dist.get_rank() == 1:
                dist.all_reduce(value, group=some)
            elif operation == "recv" and dist.get_rank():
                dist.recv(value, 0)
            elif operation == "recv from any" and dist.get_rank():
                dist.recv(value)

    @aiodaft.method
    def send_and_leave(self, nbytes: int) -> list[float]:
        """Rank 0 leaves the block before its messages are received; it receives none of its own."""
        value, got = torch.full((nbytes // 4,), float(dist.is_initialized())), torch.ones(nbytes // 4)
        with aiodaft.current_group().process_group("aiodaft"):
            if dist.get_rank() == 0:
                dist.isend(value, 1)
                return []
            dist.send(value, 0)
            dist.recv(got, 0)
        return got[:2].tolist()

    @aiodaft.method
    def reduce_for_ever(self, steps: int = 1 << 30) -> None:
        for _ in range(steps):
            dist.all_reduce(torch.ones(1 << 12))
            self.inside.set()

    @aiodaft.method(concurrency=2)
    async def wait_inside(self) -> None:
        await asyncio.to_thread(self.inside.wait)

    @aiodaft.method
    def train_and_end(self, ends: int, how: str) -> None:
        """In a block of its own, one of the members dies, or fails, while the others wait for it."""
        with aiodaft.current_group().process_group("aiodaft"):
            if dist.get_rank() == ends and how != "fails":
                os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == ends and how == "fails":
                raise ValueError("a bad batch")
            if how == "sends nothing":
                dist.recv(torch.zeros(1), ends)
            dist.all_reduce(torch.zeros(1))

    @aiodaft.method
    def sum_ranks(self) -> float:
        with aiodaft.current_group().process_group("aiodaft"):
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total)
            return total.item()
