"""The pick of a search next to six strategies of hand, measured; and the time that a search of many layers takes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiodaft.runtime import Runtime

from .results import Bench


async def run(bench: Bench) -> None:
    """Measure the hardware, search on it for two ranks, and measure steps of what it finds and of six strategies."""
    import torch  # noqa: PLC0415 - optional package

    from aiodaft import tensor  # noqa: PLC0415 - it needs torch

    from .simulated import on, seconds_of  # noqa: PLC0415 - with the others
    from .tensor_model import GPT, tokens, train  # noqa: PLC0415 - it needs torch
    from .tensor_workers import Clocked  # noqa: PLC0415 - it needs torch

    def captured(layers: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = GPT(layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        return model, tensor.capture(train, model, optimizer, *tokens())

    model, program = captured(4)
    async with Runtime() as rt:
        hardware = on(await tensor.measure_hardware(rt, 2), 2)
        best = (await asyncio.to_thread(tensor.search, program, 2, hardware)).best
        took: dict[str, float] = {}
        for title, (strategy, axes) in {"its pick": (best.strategy, best.axes), **_strategies()}.items():
            async with tensor.workers(rt, axes, Clocked) as workers:
                step = await workers.load(program.plan(strategy, axes), model.state_dict())
                took[title] = min([(await seconds_of(workers, step, tokens()))[0] for _ in range(bench.turns)])
            bench.add(f"{title}, a step", took[title], "s")
    bench.add(f"its pick ({best.words}) over the best", took["its pick"] / min(took.values()), "", "<= 1.1")
    _, deep = captured(32)
    start, cpu = time.perf_counter(), time.process_time()
    tensor.search(deep, {"tp": 2}, hardware, seconds=10)
    bench.add("a search of 32 layers", time.perf_counter() - start, "s")
    bench.add("a search of 32 layers, CPU", time.process_time() - cpu, "s", "<= 10")


def _strategies() -> dict[str, Any]:
    from aiodaft.tensor import Shard, Strategy  # noqa: PLC0415 - it needs torch

    from .tensor_workers import strategy  # noqa: PLC0415 - it needs torch

    rows: dict[str, Any] = {"*": {"dp": Shard(0)}}
    stages: dict[str, Any] = {"stages": ("blocks.1",), "microbatches": 4}
    return {
        "DP": (Strategy(inputs=rows), {"dp": 2}),
        "ZeRO-1": (Strategy(inputs=rows, optimizer=rows), {"dp": 2}),
        "ZeRO-3": (Strategy(inputs=rows, params=rows, use={"*": {}}), {"dp": 2}),
        "TP": (Strategy(params=strategy("tp").params), {"tp": 2}),
        "PP, 1F1B": (Strategy(**stages), {"pp": 2}),
        "PP, zero bubble": (Strategy(**stages, schedule="zb_h1"), {"pp": 2}),
    }
