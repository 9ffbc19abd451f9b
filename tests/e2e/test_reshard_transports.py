"""Shards move over each transport: from odd memory, without copies where that can be, and past deaths (GC5)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import torch
from sharded import Rank, State, assert_has, bits, bounds, in_place, loaded, tp, whole_tensors
from transports import REPEATED

import aiodaft
from aiodaft import Refs
from aiodaft.resharding import Layout, Sharding, reshard

pytestmark = pytest.mark.asyncio(loop_scope="module")

F32 = torch.float32


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=REPEATED)
async def shared_runtime(request: pytest.FixtureRequest) -> AsyncIterator[aiodaft.Runtime]:
    async with aiodaft.Runtime(transport=request.param) as runtime:
        await runtime.stop(await runtime.spawn(Rank))
        yield runtime


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


def cut(whole: State, ranks: int, dim: int, **lengths: Sequence[int]) -> Layout:
    return Layout(
        {"tp": ranks},
        {
            name: Sharding(
                shape=tensor.shape,
                dtype=tensor.dtype,
                dims={dim: "tp"},
                lengths={dim: lengths[name]} if name in lengths else {},
            )
            for name, tensor in whole.items()
        },
    )


async def test_odd_layouts_and_odd_memory_move_between_ranks_that_share_processes(rt: aiodaft.Runtime) -> None:
    """Large and small tensors, in more parts than rows, in views of one storage, transposed, with every second row."""
    base = torch.arange(1.0, 600 * 160 + 1).view(600, 160)
    whole: State = {
        "base": base,
        "view": base,
        "turned": base.to(torch.bfloat16).T,
        "sparse": base[::2],
        "few": torch.arange(90_000.0).view(3, 30_000),
    }
    group = await rt.group(7, Rank)
    for before, after in ((1, 7), (7, 1), (7, 5)):
        source, destination = cut(whole, before, 0), cut(whole, after, 1, view=[*[0] * (after - 1), 160])
        plan = reshard(source, destination)
        for how in (Rank.lend, Rank.give):
            await group[:before].each(Rank.hold, [(whole, bounds(source, whole, rank)) for rank in range(before)])
            moved = await plan.move(group[:before].all(how), to=group[:after])
            await assert_has(group[:after], destination, whole, moved)


async def test_lent_shards_move_without_a_copy_on_the_way(rt: aiodaft.Runtime) -> None:
    # Of column shards, no part is without gaps: only a transport that writes into place needs none.
    dims = (0, 1) if in_place() else (0,)
    shardings = {f"w{dim}": Sharding(shape=(1024, 640), dtype=F32, dims={dim: "tp"}) for dim in dims}
    source, destination = Layout({"tp": 4}, shardings), Layout({"tp": 3}, shardings)
    plan = reshard(source, destination)
    old, new = await rt.group(4, Rank), await rt.group(3, Rank)
    whole = whole_tensors(shardings)
    shards = await loaded(old, source, whole)
    await old.all(Rank.count_copies)
    await new.all(Rank.count_copies)
    moved = await plan.move(shards, to=new)
    for ref in moved:
        await ref.ready()
    # A source that writes into place copies each byte once; others copy none, and neither does the destination.
    assert tuple(await old.all(Rank.copied)) == (plan.sent if in_place() else (0, 0, 0, 0))
    assert await new.all(Rank.copied) == [0, 0, 0]
    # The new shards, and nothing else, take memory.
    assert await old.all(Rank.blocks, 0) == [0] * 4
    assert await new.all(Rank.blocks, len(dims)) == [len(dims)] * 3
    await assert_has(new, destination, whole, moved)


async def test_a_shard_that_is_written_to_while_its_bytes_are_sent_is_an_error(rt: aiodaft.Runtime) -> None:
    if in_place():
        pytest.skip("nothing is sent")
    plan = reshard(tp(2), tp(1))
    old, new = await rt.group(2, Rank), await rt.group(1, Rank)
    shards = await loaded(old, tp(2), whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)}))
    await old[0].write_at_grant()
    moved = await plan.move(shards, to=new)
    with pytest.raises(aiodaft.exceptions.BorrowError):
        await moved[0]
    del moved
    await new[0].blocks(0)


async def test_a_member_that_dies_is_named_leaves_nothing_and_its_successor_gets_its_shard(rt: aiodaft.Runtime) -> None:
    plan = reshard(tp(2), tp(2, dim=1))
    old, new = await rt.group(2, Rank), await rt.group(2, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    shards = await loaded(old, tp(2), whole)
    await Refs([*shards]).gather().ready()
    before = await old.all(Rank.blocks)
    await old.all(Rank.hold_parcels)
    moved = await plan.move(shards, to=new)
    await old.all(Rank.wait_asked)
    with pytest.raises(aiodaft.ActorDied, match=r"Rank-\d+\[0\] .*SIGKILL"):
        await new[0].end()
    with pytest.raises(aiodaft.ActorDied, match=r"Rank-\d+\[0\] .*SIGKILL"):
        await moved[0]
    await old.all(Rank.go_on)
    # The other one is not affected.
    await new[1].load(moved[1])
    assert bits((await new[1].give())["w"]) == bits(whole["w"][:, 128:])
    await new[1].drop()
    del moved
    for member, blocks in zip(old, before, strict=True):
        await member.most_on_the_way()
        await member.blocks(blocks)
    await new[1].blocks(0)
    again = await rt.group(2, Rank)
    await assert_has(again, tp(2, dim=1), whole, await plan.move(shards, to=again))


async def test_a_source_that_dies_is_replaced_and_the_plan_serves_again(rt: aiodaft.Runtime) -> None:
    plan = reshard(tp(2), tp(1))
    old, new = await rt.group(2, Rank), await rt.group(1, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    shards = await loaded(old, tp(2), whole)
    await old[1].end_at_parcel(1)
    moved = await plan.move(shards, to=new)
    with pytest.raises(aiodaft.ActorDied, match=r"Rank-\d+\[1\] .*SIGKILL"):
        await moved[0]
    del moved
    await new[0].most_on_the_way()
    await new[0].blocks(0)
    again = await rt.group(2, Rank)
    await assert_has(new, tp(1), whole, await plan.move(await loaded(again, tp(2), whole), to=new))
