"""Shards on accelerators move, here with devices that are memory of the host."""

from __future__ import annotations

import torch
from sharded import DeviceRank, Rank, assert_has, whole_tensors

import aiodaft
from aiodaft.resharding import Layout, Sharding, reshard


async def test_lent_shards_on_accelerators_are_read_there_when_they_are_done_and_not_copied_there() -> None:
    shardings = {f"w{dim}": Sharding(shape=(256, 640), dtype=torch.float32, dims={dim: "tp"}) for dim in (0, 1)}
    source, destination = Layout({"tp": 2}, shardings), Layout({"tp": 3}, shardings)
    whole = whole_tensors(shardings)
    async with aiodaft.Runtime() as rt, rt.group(2, DeviceRank) as old, rt.group(3, Rank) as new:
        await old.each(DeviceRank.copy, [source.shard(whole, rank) for rank in range(2)])
        shards = old.all(DeviceRank.lend_slowly)
        await old.all(DeviceRank.finish)
        moved = await reshard(source, destination).move(shards, to=new)
        await assert_has(new, destination, {name: tensor + 1.0 for name, tensor in whole.items()}, moved)
        assert await old.all(DeviceRank.copied_on_device) == [0, 0]
