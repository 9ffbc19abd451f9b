"""Simulated steps of training next to measured ones, on the hardware that is measured in the same run."""

from __future__ import annotations

import time
from typing import Any, Final

from aiodaft.runtime import Runtime

from .results import Bench

_STEPS: Final = 5


async def run(bench: Bench) -> None:
    """Measure the hardware, and then steps of six plans."""
    import torch  # noqa: PLC0415 - optional package

    from aiodaft import tensor  # noqa: PLC0415 - it needs torch

    from .tensor_model import GPT, tokens, train  # noqa: PLC0415 - it needs torch
    from .tensor_workers import Clocked  # noqa: PLC0415 - it needs torch

    torch.manual_seed(0)
    model, batch = GPT(layers=4), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    program = tensor.capture(train, model, optimizer, *batch)
    async with Runtime() as rt:
        for title, (strategy, axes) in _plans().items():
            plan = program.plan(strategy, axes)
            async with tensor.workers(rt, axes, Clocked) as workers:
                step = await workers.load(plan, model.state_dict())
                hardware = on(await tensor.measure_hardware(rt, 2), plan.size)
                samples = [await seconds_of(workers, step, batch) for _ in range(bench.turns)]
            simulated = plan.simulate(hardware)
            for what, found, took in (
                ("seconds", simulated.seconds, min(wall for wall, _ in samples)),
                ("CPU of all ranks", sum(simulated.busy), min(cpu for _, cpu in samples)),
            ):
                bench.add(f"{title}, {what}", took, "s")
                bench.add(f"{title}, {what}, simulated", found, "s")
                bench.add(f"{title}, {what}, error", abs(found / took - 1), "", "<= 0.15")


async def seconds_of(workers: Any, step: Any, batch: Any) -> tuple[float, float]:
    """Seconds of a step, by the wall and of CPU of all workers."""
    from .tensor_workers import Clocked  # noqa: PLC0415 - it needs torch

    before, start = await workers.group.all(Clocked.cpu), time.perf_counter()
    for _ in range(_STEPS):
        await step(*batch)
    took = time.perf_counter() - start
    return took / _STEPS, (sum(await workers.group.all(Clocked.cpu)) - sum(before)) / _STEPS


def on(hardware: Any, ranks: int) -> Any:
    """The same machine with more ranks, which share its processors."""
    from dataclasses import replace  # noqa: PLC0415 - with the others

    (link,) = hardware.links
    return replace(hardware, links=(replace(link, devices=ranks),))


def _plans() -> dict[str, Any]:
    from aiodaft.tensor import Shard, Strategy  # noqa: PLC0415 - it needs torch

    from .tensor_workers import strategy  # noqa: PLC0415 - it needs torch

    rows, params = {"*": {"dp": Shard(0)}}, strategy("tp").params
    stages: dict[str, Any] = {"stages": ("blocks.1",), "microbatches": 4}
    return {
        "DP": (Strategy(inputs=rows), {"dp": 2}),
        "ZeRO-3": (Strategy(inputs=rows, params=rows, use={"*": {}}), {"dp": 2}),
        "TP": (Strategy(params=params), {"tp": 2}),
        "PP, 1F1B": (Strategy(**stages), {"pp": 2}),
        "PP, zero bubble": (Strategy(**stages, schedule="zb_h1"), {"pp": 2}),
        "PP x DP x TP": (Strategy(params=params, inputs=rows, **stages), {"pp": 2, "dp": 2, "tp": 2}),
    }
