"""Measures the hardware of workers in a few seconds: what operations, collectives and messages take there."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aiodaft.actor import Actor
from aiodaft.group import Group
from aiodaft.member import current_group
from aiodaft.methods import method
from aiodaft.placement import Spawner
from aiodaft.tensor.costs import counter_of
from aiodaft.tensor.hardware import Hardware, Link

_VIEWS: Final = frozenset({"aten.view", "aten.t", "aten.transpose", "aten.detach", "aten.split"})
# Their rates depend on the dtype.
_PRODUCTS: Final = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})

_SIDE, _ROWS, _LENGTH, _HEADS = 256, 8, 128, 4
_SMALL, _LARGE, _TIMES, _ROUNDS = 8, 1 << 22, 7, 20


class _Machine(NamedTuple):
    host: str
    processors: int
    memory: int


class _Probe(Actor):
    def __init__(self) -> None:
        # As workers do.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)

    @method
    def machine(self) -> _Machine:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return _Machine(platform.node(), len(os.sched_getaffinity(0)), memory)

    @method
    def compute(self) -> dict[str, float]:
        """The rate of matrix products, by dtype."""
        return {
            str(dtype).removeprefix("torch."): 2
            * _SIDE**3
            / _best(lambda x: x @ x, torch.ones(_SIDE, _SIDE, dtype=dtype))
            for dtype in (torch.float32, torch.float64, torch.bfloat16)
        }

    @method
    def operations(self) -> tuple[float, float, dict[str, float]]:
        """Seconds of an operation without work, bytes per second of a sum, and the rates of a layer's operations."""
        overhead, rates = _rates()
        large = torch.ones(_LARGE // 16)
        bandwidth = 3 * large.nbytes / (_best(lambda x: x + x, large) - overhead)
        return overhead, bandwidth, rates

    @method
    def reduced(self, ranks: Sequence[int], numel: int) -> float:
        """Seconds of an all_reduce of so many floats, among these ranks."""
        if current_group().rank not in ranks:
            return 0.0
        plan = current_group().part(ranks).plan(key=("measure", numel)).result()
        try:
            return _best(lambda x: plan.all_reduce(x).start().result(), torch.ones(numel))
        finally:
            plan.close()

    @method
    def sent(self, ranks: Sequence[int]) -> float:
        """Seconds of a processor that a message takes at this rank, one of two; they work in turns."""
        group = current_group()
        if group.rank not in ranks:
            return 0.0
        here, there = group.rank, ranks[group.rank == ranks[0]]

        def there_and_back(x: Tensor) -> None:
            if here == ranks[0]:
                group.isend(x, to=there).result()
                group.irecv(source=there).result()
            else:
                group.irecv(source=there).result()
                group.isend(x, to=there).result()

        x = torch.ones(_SIDE**2)  # more than goes inside of a message
        there_and_back(x)
        start = time.process_time()
        for _ in range(_ROUNDS):
            there_and_back(x)
        return (time.process_time() - start) / (2 * _ROUNDS)


def _best(work: Callable[[Tensor], object], x: Tensor) -> float:
    """The least seconds of some work."""
    took = []
    for _ in range(_TIMES):
        times = 1 if x.numel() > _SMALL else 20
        start = time.perf_counter()
        for _ in range(times):
            work(x)
        took.append((time.perf_counter() - start) / times)
    return min(took)


class _Clock(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Notes the least seconds of each operation of a function that is called several times."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.seconds: dict[tuple[int, str], float] = {}
        self.amounts: dict[tuple[int, str], int] = {}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        took = time.perf_counter() - start
        key = self.count, str(func.overloadpacket)
        self.count += 1
        self.seconds[key] = min(took, self.seconds.get(key, took))
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
        count = counter_of(func.overloadpacket)
        work = (
            count(*args, **(kwargs or {}), out_val=result) if count is not None else sum(one.nbytes for one in tensors)
        )
        self.amounts[key] = int(work)
        return result


def _rates() -> tuple[float, dict[str, float]]:
    """The seconds of a view among other operations, and the rates of these, each by its largest call."""
    layer = nn.TransformerEncoderLayer(_SIDE, _HEADS, 4 * _SIDE, 0.0, functional.gelu, batch_first=True)
    model, x = nn.Sequential(nn.Embedding(_SIDE, _SIDE), layer), torch.randint(_SIDE, (_ROWS, _LENGTH))
    optimizer, clock = torch.optim.AdamW(model.parameters(), foreach=False), _Clock()
    for at in range(_TIMES):
        # The first step makes the state of the optimizer.
        with clock if at else nullcontext():
            clock.count = 0
            h = model(x)
            h = torch.softmax(functional.silu(h) * torch.tanh(h).relu(), -1)
            loss = functional.cross_entropy(h.flatten(0, 1), x.flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            optimizer.step()
            optimizer.zero_grad()
    largest: dict[str, tuple[int, float]] = {}
    for (at, name), amount in clock.amounts.items():
        largest[name] = max(largest.get(name, (0, 0.0)), (amount, -clock.seconds[at, name]))
    overhead = median(seconds for (_, name), seconds in clock.seconds.items() if name in _VIEWS)
    return overhead, {
        name: amount / max(-minus - overhead, overhead / 10)
        for name, (amount, minus) in largest.items()
        if name not in _PRODUCTS | _VIEWS and amount > _SIDE**2
    }


async def measure_hardware(spawner: Spawner, ranks: int = 2, **options: Any) -> Hardware:
    """Measure what operations, collectives and messages take at workers, in a few seconds.

    It makes actors for that, as `workers` does. Ranks compute one after the other, and a pair of ranks on a host, and
    one of ranks on two hosts, measure the links: the processors of a host are shared.

    Args:
        spawner: The runtime or scope that owns them.
        ranks: The number of ranks; those of a host follow each other, and each host has as many.
        options: As for `on`: `cpus=2`, `spread=True`, ...

    Raises:
        ValueError: There are less than 2 ranks, or hosts have different numbers of ranks.
        Exception: As `group`.

    Cancellation: the actors end.
    """
    if ranks < 2:  # a link has two ends
        raise ValueError(f"ranks is {ranks}: links are measured between at least 2")
    async with spawner.on(**options).group(ranks, _Probe) as group:
        machines: list[_Machine] = await group.all(_Probe.machine)
        hosts = Counter(one.host for one in machines)
        if len(set(hosts.values())) > 1:
            raise ValueError(f"hosts have {dict(hosts)} ranks: give each as many")
        near = hosts[machines[0].host]
        compute = [await one.compute() for one in group]
        overhead, bandwidth, rates = await group[0].operations()
        processors = sum({one.host: one.processors for one in machines}.values())
        share = min(1.0, processors / 2)
        links = [
            await _link(group, [0, 1 if devices == near else near], devices, share)
            for devices in dict.fromkeys((near, ranks))
            if devices > 1
        ]
    return Hardware(
        compute=compute[0],
        memory=machines[0].memory / near,
        bandwidth=bandwidth,
        overhead=overhead,
        links=links,
        rates=rates,
        processors=processors,
        uneven=_uneven(compute),
    )


async def _link(group: Group[_Probe], pair: list[int], devices: int, share: float) -> Link:
    small, large = [share * max(await group.all(_Probe.reduced, pair, numel)) for numel in (_SMALL, _LARGE)]
    message = sum(await group.all(_Probe.sent, pair))
    return Link(devices=devices, bandwidth=4 * _LARGE / max(large - small, 1e-9), latency=small, message=message)


def _uneven(compute: Sequence[Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """The ranks that are slower or faster than the first one by more than measuring explains."""
    factors = {rank: one["float32"] / compute[0]["float32"] for rank, one in enumerate(compute)}
    return {rank: {"compute": factor} for rank, factor in factors.items() if not 0.5 < factor < 2}
