"""Steps of torch's own distributed training over `process_group("aiodaft")`, next to the same steps over gloo.

Two groups of actors have a process group each, of the one kind and of the other, and take turns. The slowest member
counts. torch has one thread in each.
"""

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

_STEPS: Final = 10
_WIDTH: Final = 256
_ROWS: Final = 64
_BLOCKS: Final = 4
# By the program: the budgets of its time and its CPU, of those over gloo.
_BUDGETS: Final = {"DDP": ("<= 1.0", "<= 1.0"), "FSDP2": ("<= 0.8", ""), "TP": ("<= 0.8", "")}


class Trainer(Actor):
    """A rank that trains a model by each of the programs."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - optional package

        torch.set_num_threads(1)
        self._kept = ExitStack()
        self._trained: dict[str, tuple[Any, Any]] = {}

    @method
    def open(self, backend: str) -> None:
        """Open the process group, and distribute a model by each program."""
        import torch  # noqa: PLC0415 - optional package

        self._kept.enter_context(current_group().process_group(backend))
        for name, distribute in (("DDP", _replicated), ("FSDP2", _sharded), ("TP", _cut)):
            torch.manual_seed(0)
            model = distribute(_model())
            self._trained[name] = model, torch.optim.SGD(model.parameters(), lr=1e-3)

    @method
    def close(self) -> None:
        """Leave the process group."""
        self._trained.clear()
        self._kept.close()

    @method
    def train(self, name: str) -> tuple[float, float]:
        """Seconds, and those of a CPU, that a step takes, of some one after the other."""
        import torch.distributed  # noqa: PLC0415 - optional package

        dist: Any = torch.distributed
        (model, optimizer), x = self._trained[name], torch.ones(_ROWS, _WIDTH)
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(_STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - start) / _STEPS, (time.process_time() - cpu) / _STEPS


def _model() -> Any:
    from torch import nn  # noqa: PLC0415 - optional package

    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
            for _ in range(_BLOCKS)
        )
    )


def _replicated(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415 - optional package

    return DistributedDataParallel(model)


def _sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - optional package

    mesh = _mesh()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _cut(model: Any) -> Any:
    from torch.distributed.tensor import parallel  # noqa: PLC0415 - optional package

    ways: dict[str, Any] = {}
    for block in range(_BLOCKS):
        ways[f"{block}.0"], ways[f"{block}.2"] = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    return parallel.parallelize_module(model, _mesh(), ways)


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - optional package

    return init_device_mesh("cpu", (current_group().size,))


async def run(bench: Bench, count: int = 2) -> None:
    """Measure the steps of `count` ranks."""
    async with Runtime(preload=("torch", "torch._dynamo")) as rt:
        ours, theirs = await rt.group(count, Trainer), await rt.group(count, Trainer)
        await ours.all(Trainer.open, "aiodaft")
        await theirs.all(Trainer.open, "gloo")
        for name, budgets in _BUDGETS.items():
            for of, (what, budget) in enumerate(zip(("", ", CPU"), budgets, strict=True)):
                line = f"a step of {name}, {count} ranks{what}"
                await bench.compare(
                    line, partial(_slowest, ours, name, of), partial(_slowest, theirs, name, of), "gloo", budget
                )
        await ours.all(Trainer.close)
        await theirs.all(Trainer.close)


async def _slowest(group: Group[Trainer], name: str, of: int) -> float:
    return max(found[of] for found in await group.all(Trainer.train, name))
