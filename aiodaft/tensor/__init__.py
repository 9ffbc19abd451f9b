"""Torch code written for one device, run by a group of workers: a strategy, which is data, says how.

    program = tensor.capture(train, model, optimizer, x, y)      # whole tensors, no word of distribution
    plan = program.plan(Strategy(params={"*.up.weight": {"tp": Shard(0)}}), {"tp": 2})
    async with aiodaft.Runtime() as rt, tensor.workers(rt, plan.axes) as workers:
        step = await workers.load(plan, state=model.state_dict())
        loss = await step(x, y)                                  # one message to each worker

The first use of a name loads its module: workers do not load what only planning needs. Type checkers read __init__.pyi.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "aiodaft.tensor.capturing": "capture",
    "aiodaft.tensor.handles": "DistTensor",
    "aiodaft.tensor.hardware": "PRESETS Hardware Link",
    "aiodaft.tensor.loading": "Run Step Workers workers",
    "aiodaft.tensor.local_functions": "local",
    "aiodaft.tensor.measuring": "measure_hardware",
    "aiodaft.tensor.plan": "Plan",
    "aiodaft.tensor.program": "ImplicitCollectives Program",
    "aiodaft.tensor.randoms": "manual_seed",
    "aiodaft.tensor.recorder": "immediate",
    "aiodaft.tensor.rules": "rule",
    "aiodaft.tensor.segments": "Collective",
    "aiodaft.tensor.searching": "Candidate Found search",
    "aiodaft.tensor.simulation": "Simulation",
    "aiodaft.tensor.strategy": "Strategy",
    "aiodaft.tensor.tracer": "CaptureError",
    "aiodaft.tensor.worker": "Worker",
    "torch.distributed.tensor": "Partial Replicate Shard",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] - it reads the stub


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
