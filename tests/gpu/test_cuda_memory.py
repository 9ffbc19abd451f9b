"""The memory of a GPU: dead processes give it back, and an error tells of too little: `pytest -m gpu`.

Other tests may use the GPU at the same time, so the measured amounts are many GiB.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cuda_memory import Hoarder
from on_gpu import GIB, MIB, ON_ONE_LOOP, keepers, memory_by_process

import aiodaft

pytestmark = ON_ONE_LOOP

MUCH = 8 * GIB


def free() -> int:
    """Bytes of the GPU that no process has."""
    return torch.cuda.mem_get_info()[0]


def most_of_the_gpu() -> int:
    """So much that there is no room for it twice; a third of the GPU's free memory may come or go meanwhile."""
    return free() // 3 * 2


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No two tests of this file fill the GPU at the same time, also if several processes run tests.

    Actors that fill it end with their test.
    """
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("ends", ["killed", "stopped", "crashed"])
async def test_an_actor_that_ends_frees_its_device_memory(module_rt: aiodaft.Runtime, ends: str) -> None:
    hoarder = await module_rt.spawn(Hoarder, MUCH)
    pid = (await module_rt.info(hoarder)).pid
    # A second actor holds a part of it through a value.
    (other,) = await keepers(module_rt, 1)
    value = hoarder.make(1 << 20, 7)
    await other.echo(value).ready()
    assert memory_by_process()[pid] >= MUCH
    if ends == "crashed":
        with pytest.raises(aiodaft.ActorDied):
            await hoarder.crash()
    else:
        await (module_rt.kill if ends == "killed" else module_rt.stop)(hoarder)
    while pid in memory_by_process():
        await asyncio.sleep(0)


async def test_the_next_incarnation_finds_the_memory_of_the_last_one_free(module_rt: aiodaft.Runtime) -> None:
    restart = aiodaft.Restart(intensity=2, period=60, backoff=aiodaft.Backoff(base=0.001, factor=1))
    size = most_of_the_gpu()
    async with module_rt.scope() as rt:
        hoarder = await rt.on(restart=restart).spawn(Hoarder, size)
        for _ in range(2):
            with pytest.raises(aiodaft.ActorDied):
                await hoarder.crash()
            assert await hoarder.size() == size


async def test_a_snapshot_for_which_there_is_no_memory_fails_its_call_alone(module_rt: aiodaft.Runtime) -> None:
    async with module_rt.scope() as rt:
        hoarder = await rt.spawn(Hoarder, most_of_the_gpu())
        (other,) = await keepers(rt, 1)
        with pytest.raises(aiodaft.ResourceExhausted, match=r"out of memory \(CUDA error 2\): free memory of the GPU"):
            await other.echo(hoarder.give())
        assert await hoarder.first(other.make(MIB, 3.0)) == 3
        await hoarder.let_go()
        assert await hoarder.first(hoarder.make(GIB, 4)) == 4
        assert int((await other.echo(hoarder.make(GIB, 5)))[-1]) == 5


async def test_a_value_for_which_the_consumer_has_no_memory_fails_there_alone(module_rt: aiodaft.Runtime) -> None:
    poor, rich = await module_rt.spawn(Hoarder, limit=GIB), await module_rt.spawn(Hoarder)
    value = rich.make(2 * GIB, 6)
    for _ in range(2):
        with pytest.raises((aiodaft.ResourceExhausted, torch.OutOfMemoryError), match="out of memory"):
            await poor.first(value)
    # Others get it, and the poor one gets less.
    assert int((await value)[-1]) == 6
    assert await poor.first(rich.make(GIB // 4, 7)) == 7


async def test_torch_s_error_comes_as_it_is_from_a_method(module_rt: aiodaft.Runtime) -> None:
    hoarder = await module_rt.spawn(Hoarder)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory. Tried to allocate") as caught:
        await hoarder.take_more(1 << 46)
    assert type(caught.value) is torch.OutOfMemoryError
    assert any("Hoarder-" in note for note in caught.value.__notes__)
    assert await hoarder.take_more(MIB) == MIB
    assert await hoarder.first(hoarder.make(MIB, 8)) == 8


async def test_many_transfers_leave_no_memory_of_the_gpu_behind(module_rt: aiodaft.Runtime) -> None:
    a, b = await keepers(module_rt, 2)
    before = free()
    for _ in range(100):
        await b.where(a.make(256 * MIB, 1.0))
    gc.collect()
    # Any one copy that stayed would be 25 GiB by now.
    assert free() > before - 12 * GIB
