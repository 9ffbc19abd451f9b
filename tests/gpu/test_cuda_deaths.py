"""Processes with memory of a GPU that die or stop, also in mid-copy, harm no other one: `pytest -m gpu`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import pytest
import torch
from actors import Box
from cuda_actors import GpuKeeper
from on_gpu import MIB, ON_ONE_LOOP, all_given_back, keepers

import aiodaft
from aiodaft_transport import PeerGone

pytestmark = ON_ONE_LOOP


async def in_mid_copy(consumer: GpuKeeper, ref: aiodaft.Ref[torch.Tensor], size: int) -> aiodaft.Ref[float]:
    """Have a consumer fetch a value, and wait until its GPU was told to copy, behind a second of other work."""
    # It has opened the memory of the producer before: that would wait for the other work.
    await consumer.where(ref)
    taking = consumer.take_behind(Box(ref), size)
    while not await consumer.pulls():
        assert not taking.done()
    return taking


async def test_a_producer_that_dies_before_its_value_is_made_fails_what_waits_for_it(
    module_rt: aiodaft.Runtime,
) -> None:
    a, b, c = await keepers(module_rt, 3)
    kept = await a.make(16 * MIB, 1.0)
    waiting = b.where(a.make_late(16 * MIB, 5.0))
    await a.traffic()
    a.die.tell()
    with pytest.raises((aiodaft.ActorDied, PeerGone)):
        await waiting
    # A value that has come is the consumer's own.
    assert float(kept.sum()) == 16.0 * MIB
    assert (await b.where(kept))[2] == 16.0 * MIB
    assert (await b.where(c.make(16 * MIB, 2.0)))[2] == 32.0 * MIB


async def test_a_producer_killed_in_mid_copy_fails_that_copy_and_nothing_else(module_rt: aiodaft.Runtime) -> None:
    a, b, c = await keepers(module_rt, 3)
    ref = a.make(256 * MIB, 1.0)
    taking = await in_mid_copy(b, ref, 256 * MIB)
    await module_rt.kill(a)
    with pytest.raises(aiodaft.ActorDied):
        await taking
    for producer, consumer in ((c, b), (b, c)):
        assert (await consumer.where(producer.make(16 * MIB, 2.0)))[2] == 32.0 * MIB
    # Its GPU has reported the end of that copy, and goes on.
    while await b.pulls():
        await asyncio.sleep(0)
    del ref


async def test_a_consumer_killed_in_mid_copy_gives_back_what_it_was_granted(module_rt: aiodaft.Runtime) -> None:
    a, b, c = await keepers(module_rt, 3)
    ref = a.make(256 * MIB, 1.0)
    taking = await in_mid_copy(b, ref, 256 * MIB)
    await module_rt.kill(b)
    with pytest.raises(aiodaft.ActorDied, match="killed by its owner"):
        await taking
    assert (await c.where(ref))[2] == 256.0 * MIB
    del ref, taking
    gc.collect()
    await all_given_back(a)


async def test_a_consumer_that_dies_with_many_fetches_gives_everything_back(module_rt: aiodaft.Runtime) -> None:
    a, b, c = await keepers(module_rt, 3)
    ref = a.make(64 * MIB, 1.0)
    await ref.ready()
    waiting = [b.where(ref) for _ in range(10)]
    b.die.tell()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(error, aiodaft.ActorDied) for error in ended)
    assert (await c.where(ref))[2] == 64.0 * MIB
    del ref, waiting, ended
    gc.collect()
    await all_given_back(a)


async def test_a_stopped_actor_blocks_no_other_one_and_goes_on_where_it_was(module_rt: aiodaft.Runtime) -> None:
    a, b, c = await keepers(module_rt, 3)
    ref = a.make(256 * MIB, 1.0)
    for stopped, other in ((b, a), (a, b)):
        taking = await in_mid_copy(b, ref, 256 * MIB)
        pid = (await module_rt.info(stopped)).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for value in range(20):
                assert (await c.where(other.make(MIB, float(value))))[2] == MIB * value
                assert (await other.where(c.make(MIB, float(value))))[2] == MIB * value
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await taking == 256.0 * MIB
