"""The distributed tensors that `tensors` measures; it needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self

import torch

from aiodaft import tensor
from aiodaft.methods import method
from aiodaft.runtime import Runtime
from aiodaft.tensor import Shard, Strategy

from .tensor_model import GPT, SIDE, chain, tokens, train

__all__ = ["Clocked", "Ours", "planning", "strategy"]


class Clocked(tensor.Worker):
    """A worker that reads its clock."""

    @method
    def cpu(self) -> float:
        """Seconds of CPU of this process."""
        return time.process_time()


class Ours:
    """Two workers."""

    def __init__(self, workers: tensor.Workers) -> None:
        self._workers = workers
        self._x = workers.put(torch.ones(SIDE, SIDE), tp=Shard(0))
        self._step: Any = None

    @classmethod
    async def start(cls, rt: Runtime) -> Self:
        """Start them, for the time of the runtime."""
        return cls(await tensor.workers(rt, {"tp": 2}, Clocked))

    async def recorded(self, where: str, operations: int) -> float:
        """CPU seconds of an operation in a block, here or at a worker."""
        recorder = self._workers.recorder
        with torch.no_grad():
            clock = await self._cpu(where)
            last = chain(self._x, self._x, operations)
            recorder.flush()
            await recorder.settle(last.cell.block)
            return (await self._cpu(where) - clock) / operations

    async def load_chain(self, operations: int) -> None:
        """Load the plan of a chain."""
        x = torch.ones(SIDE, SIDE)
        program = tensor.capture(lambda x: chain(x, x, operations).sum(), x)
        plan = program.plan(Strategy(inputs={"x": {"tp": Shard(0)}}), {"tp": 2})
        self._step = await self._workers.load(plan)
        await self._step(x)

    async def fused(self, operations: int, steps: int = 5) -> float:
        """CPU seconds of an operation in a step, at a worker."""
        x = torch.ones(SIDE, SIDE)
        clock = await self._cpu("worker")
        for _ in range(steps):
            await self._step(x)
        return (await self._cpu("worker") - clock) / operations / steps

    async def load(self, kind: str) -> None:
        """Load a step of training."""
        torch.manual_seed(0)
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        program = tensor.capture(train, model, optimizer, *tokens())
        plan = program.plan(strategy(kind), {"tp": 2})
        self._step = await self._workers.load(plan, state=model.state_dict())
        await self._step(*tokens())

    async def steps(self, kind: str, steps: int) -> float:
        """Seconds of a step, by the wall or of CPU at a worker."""
        batch = tokens()
        clock = await self._clock(kind)
        for _ in range(steps):
            await self._step(*batch)
        return (await self._clock(kind) - clock) / steps

    async def _clock(self, kind: str) -> float:
        return time.perf_counter() if kind == "wall" else await self._cpu("worker")

    async def _cpu(self, where: str) -> float:
        if where == "controller":
            return time.process_time()
        seconds: float = (await self._workers.group.all(Clocked.cpu))[0]
        return seconds


def strategy(kind: str) -> Strategy:
    """Tensor or data parallelism over the axis `tp`."""
    if kind == "dp":
        return Strategy(inputs={"*": {"tp": Shard(0)}})
    columns = {f"blocks.*.{name}.*": {"tp": Shard(0)} for name in ("q", "k", "v", "up")}
    return Strategy(params=columns | {f"blocks.*.{name}.weight": {"tp": Shard(1)} for name in ("out", "down")})


def planning(layers: int) -> Iterator[tuple[str, float, float]]:
    """Titles, CPU seconds and limits: of a capture, of its first plan, and of a second one."""
    with torch.device("meta"):
        model = GPT(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = time.process_time()
    program = tensor.capture(train, model, optimizer, *tokens())
    yield f"capture of {layers} layers", time.process_time() - start, 6.0
    for title, kind, limit in (("plan", "tp", 1.5), ("second strategy", "dp", 1.0)):
        start = time.process_time()
        program.plan(strategy(kind), {"tp": 2})
        yield f"{title} of {layers} layers", time.process_time() - start, limit
