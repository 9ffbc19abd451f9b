"""The common part of the tests of tests/gpu."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import pytest
import torch
from cuda_actors import GpuKeeper

import aiodaft

# Elements of float32 in a MiB.
MIB = 1 << 18
GIB = 1 << 30
_NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(120),
]
# For a file whose tests differ by the event loop, for one whose tests do not, and for one whose tests share no actors.
ON_BOTH_LOOPS = [*_NEEDS_GPU, pytest.mark.asyncio(loop_scope="module")]
ON_ONE_LOOP = [*_NEEDS_GPU, pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])]
ON_OWN_LOOPS = [*_NEEDS_GPU, pytest.mark.asyncio(loop_factories=["uvloop"])]


async def keepers(rt: aiodaft.Runtime | aiodaft.Scope, count: int, *devices: int, **options: Any) -> list[GpuKeeper]:
    """Actors on one GPU, which begin side by side."""

    async def begin() -> GpuKeeper:
        keeper = await rt.spawn(GpuKeeper, *devices, **options)
        # torch is loaded, and there is a context, before anything is counted.
        await keeper.make(1, 0.0).ready()
        return keeper

    return list(await asyncio.gather(*(begin() for _ in range(count))))


def memory_by_process() -> dict[int, int]:
    """Bytes of GPUs that processes have, by their pids."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(pid): int(mib) << 20 for pid, mib in (line.split(",") for line in lines)}


async def all_given_back(keeper: GpuKeeper) -> None:
    """Wait until no value of an actor is in the memory that it exports."""
    while await keeper.blocks():
        await asyncio.sleep(0)
