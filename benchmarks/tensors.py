"""Distributed tensors, next to plain torch, and to torch's own DTensor, tensor parallelism and DDP over gloo."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from aiodaft.actor import Actor
from aiodaft.group import Group
from aiodaft.member import current_group
from aiodaft.methods import method
from aiodaft.runtime import Runtime

from .results import Bench

_OPERATIONS: Final = 400
_STEPS: Final = 5


class Rank(Actor):
    """A rank of torch's own frameworks, over gloo."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - optional package
        import torch.distributed as dist  # noqa: PLC0415 - optional package

        torch.set_num_threads(1)
        self._joined = ExitStack()
        self._dist: Any = dist
        self._model: Any = None
        self._optimizer: Any = None
        self._rows = False

    @method
    def join(self) -> None:
        """Join the process group."""
        self._joined.enter_context(current_group().process_group("gloo"))

    @method
    def leave(self) -> None:
        """Leave it."""
        self._joined.close()

    @method
    def chain(self, of: str) -> float:
        """CPU seconds of an operation of a chain, on a plain local tensor or on a DTensor."""
        import torch  # noqa: PLC0415 - optional package
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - optional package
        from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415 - optional package

        from .tensor_model import SIDE, chain  # noqa: PLC0415 - it needs torch

        x = torch.ones(SIDE, SIDE)
        mesh = init_device_mesh("cpu", (self._dist.get_world_size(),))
        x = x.chunk(2)[0].clone() if of == "plain" else distribute_tensor(x, mesh, [Shard(0)])
        with torch.no_grad():
            chain(x, x, _OPERATIONS)
            start = time.process_time()
            chain(x, x, _OPERATIONS)
            return (time.process_time() - start) / _OPERATIONS

    @method
    def model(self, kind: str) -> None:
        """Make a model: of tensor parallelism, or of data parallelism."""
        import torch  # noqa: PLC0415 - optional package
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - optional package
        from torch.distributed.tensor import parallel  # noqa: PLC0415 - optional package

        from .tensor_model import GPT  # noqa: PLC0415 - it needs torch

        torch.manual_seed(0)
        self._model, self._rows = GPT(), kind == "dp"
        if kind == "dp":
            self._model = torch.nn.parallel.DistributedDataParallel(self._model)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for block in self._model.blocks:
                column, row = parallel.ColwiseParallel(), parallel.RowwiseParallel()
                ways = {"q": column, "k": column, "v": column, "out": row, "up": column, "down": row}
                parallel.parallelize_module(block, mesh, ways)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, foreach=False)

    @method
    def steps(self, kind: str) -> float:
        """Seconds of a step, by the wall or of CPU."""
        from .tensor_model import tokens, train  # noqa: PLC0415 - it needs torch

        clock = time.perf_counter if kind == "wall" else time.process_time
        x, y = tokens()
        if self._rows:
            rank = self._dist.get_rank()
            x, y = x.chunk(2)[rank], y.chunk(2)[rank]
        start = clock()
        for _ in range(_STEPS):
            train(self._model, self._optimizer, x, y).item()
        return (clock() - start) / _STEPS


async def run(bench: Bench) -> None:
    """Measure operations, steps of training, and the planning of 24 layers."""
    from .tensor_workers import Ours, planning  # noqa: PLC0415 - they need torch

    async with Runtime() as rt, rt.group(2, Rank) as theirs:
        await theirs.all(Rank.join)
        ours = await Ours.start(rt)
        await _operations(bench, ours, theirs)
        for kind, limit in (("tp", 0.6), ("dp", 0.85)):
            await theirs.all(Rank.model, kind)
            await ours.load(kind)
            for clock, title in (("wall", "wall"), ("cpu", "CPU of a rank")):
                floor = partial(_first, theirs, Rank.steps, clock)
                steps = partial(ours.steps, clock, _STEPS)
                await bench.compare(f"{kind.upper()}2 step, {title}", steps, floor, "torch, gloo", f"<= {limit}", "s")
        await theirs.all(Rank.leave)
    for title, seconds, limit in planning(layers=24):
        bench.add(title, seconds, "s", f"<= {limit}")


async def _operations(bench: Bench, ours: Any, theirs: Group[Rank]) -> None:
    dtensor, plain = partial(_first, theirs, Rank.chain, "dtensor"), partial(_first, theirs, Rank.chain, "plain")
    await ours.load_chain(_OPERATIONS)
    a_dtensor = "an operation on a DTensor"
    at_worker, fused = partial(ours.recorded, "worker", _OPERATIONS), partial(ours.fused, _OPERATIONS)
    cost = await bench.median_of(partial(ours.recorded, "controller", _OPERATIONS))
    bench.add("recorded operation, CPU of the controller", cost * 1e6, "us", "<= 10")
    await bench.compare("recorded operation, CPU of a worker", at_worker, dtensor, a_dtensor, "<= 0.5")
    await bench.compare("planned operation, CPU of a worker", fused, plain, "an operation of plain torch", "<= 1.5")
    await bench.compare("planned operation, to a DTensor", fused, dtensor, a_dtensor, "<= 0.35")


async def _first(group: Group[Any], call: Any, *args: Any) -> float:
    first: float = (await group.all(call, *args))[0]
    return first
