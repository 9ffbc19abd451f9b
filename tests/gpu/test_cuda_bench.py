"""The benchmark of GPUs runs on a real one: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu
from benchmarks.results import Bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_factories=["uvloop"]),
]


async def test_each_line_has_a_number_and_no_tensor_goes_through_the_host() -> None:
    bench = Bench(1)
    await gpu.run(bench, large={64 << 20: 8}, many=100, most=4)
    lines = {result.name: result for result in bench.results}
    host = lines.pop("through the host, lines above")
    assert host.value == 0
    assert all(result.value > 0 for result in lines.values())
    without_floor = [name for name, result in lines.items() if not result.floor]
    assert without_floor == ["a tensor from actor to actor"]
    assert {"64 MiB, fresh", "64 MiB, 8 in flight, lent", "64 MiB, lent / torch IPC", "64 MiB, second consumer"} < set(
        lines
    )
