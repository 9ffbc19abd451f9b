"""Tensors on accelerators in compiled graphs, with devices that are memory of the host."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from device_actors import DeviceKeeper
from graph_actors import Node
from host_devices import HostAccelerators, HostDriver

import aiodaft
from aiodaft import Ref

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 1 << 18
PRELOAD = ("torch",)


async def test_they_go_from_actor_to_actor_and_touch_no_host_memory(
    module_rt: aiodaft.Runtime, here: HostDriver
) -> None:
    a, b = await module_rt.spawn(DeviceKeeper, 0), await module_rt.spawn(DeviceKeeper, 0)
    beside = await module_rt.on(with_=a).spawn(Node)

    def flow(size: Ref[int], given: Ref[Any]) -> list[Ref[Any]]:
        made, threaded = a.make(size, 3.0), a.make_on_thread(size, 4.0)
        # In one row, in one process, from process to process, and back to the owner from where it was used too.
        return [b.where(a.echo(made)), b.where(beside.same(threaded)), made, b.where(given), a.echo(made)]

    async with aiodaft.compile(flow) as graph:
        for run in range(1, 4):
            there, through, made, given, echoed = graph(SIZE, here.tensor(SIZE).fill_(float(run)))
            assert await there == (0, SIZE * 3.0)
            assert await through == (0, SIZE * 4.0)
            assert await given == (0, SIZE * float(run))
            for tensor in (await made, await echoed):
                assert HostAccelerators(here).device_of(tensor) == 0
                assert float(tensor.sum()) == SIZE * 3.0
        sent = await a.traffic()
        assert sent["payload"] == sent["device"] > 0
        del there, through, made, given, echoed, tensor
    gc.collect()
    while await a.blocks():
        await asyncio.sleep(0)


async def test_what_one_step_writes_is_not_seen_by_others(module_rt: aiodaft.Runtime) -> None:
    a, b = await module_rt.spawn(DeviceKeeper, 0), await module_rt.spawn(DeviceKeeper, 0)

    def flow(size: Ref[int]) -> list[Ref[Any]]:
        made, other = a.make(size, 3.0), a.make_on_thread(size, 4.0)
        values = (made, other)
        written = [step for value in values for step in (a.add_in_place(value, 1.0), a.sum_on_thread(value))]
        return [*written, *(b.add_in_place(value, 1.0) for value in values * 2)]

    async with aiodaft.compile(flow) as graph:
        assert [await ref for ref in graph(SIZE)] == [4.0, SIZE * 3.0, 5.0, SIZE * 4.0, 4.0, 5.0, 4.0, 5.0]


async def test_a_step_has_its_value_though_its_owner_has_freed_it(module_rt: aiodaft.Runtime, here: HostDriver) -> None:
    a, gate = await module_rt.spawn(DeviceKeeper, 0), await module_rt.spawn(Node)
    beside = await module_rt.on(with_=a).spawn(Node)

    def flow(size: Ref[int]) -> list[Ref[Any]]:
        made = a.make(size, 3.0)
        return [made, beside.same([made, gate.wait()])]

    async with aiodaft.compile(flow) as graph:
        made, late = graph(SIZE)
        await made
        del made
        gc.collect()
        # The object has other content now, and the memory is others'.
        await a.overwrite(1.0)
        assert await a.make(SIZE, 7.0) is not None
        await gate.open()
        assert float((await late)[0].sum()) == SIZE * 3.0


async def test_no_step_gets_what_the_device_has_not_made_or_waits_for_it(
    module_rt: aiodaft.Runtime, here: HostDriver
) -> None:
    a, b = await module_rt.spawn(DeviceKeeper, 0), await module_rt.spawn(DeviceKeeper, 0)

    def flow(size: Ref[int]) -> list[Ref[Any]]:
        made = a.make_slowly(size, 5.0)
        return [b.where(made), made, a.overwrite_behind(9.0)]

    async with aiodaft.compile(flow) as graph:
        total, made, over = graph(SIZE)
        await over
        assert not total.done()
        assert not made.done()
        await a.open_gate()
        assert await total == (0, SIZE * 5.0)
        assert float((await made).sum()) == SIZE * 5.0
