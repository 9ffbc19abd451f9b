"""Sharded tensors move from group to group: bit-exact, with the fewest bytes, in bounded memory (GC5, DT2)."""

from __future__ import annotations

import pytest
import torch
from each_transport import of_module, on_each_transport
from sharded import Rank, assert_has, bits, in_place, loaded, tp, whole_tensors

import aiodaft
from aiodaft import Group, Refs
from aiodaft.resharding import Layout, Sharding, reshard

pytestmark = pytest.mark.asyncio(loop_scope="module")

F32 = torch.float32
KIB = 1 << 10


shared_runtime, rt = on_each_transport, of_module


async def received(group: Group[Rank]) -> list[tuple[int, int]]:
    return await group.all(Rank.received)


async def sent(group: Group[Rank]) -> list[int]:
    return [nbytes for _, nbytes in await group.all(Rank.sent)]


def lower_bound(destination: Layout) -> int:
    return sum(destination.nbytes(rank) for rank in range(destination.size))


@pytest.mark.parametrize("shared_runtime", ["shm", "tcp"], indirect=True)
async def test_four_parts_become_three_in_the_fewest_bytes_and_none_comes_here(rt: aiodaft.Runtime) -> None:
    source, destination = tp(4), tp(3)
    plan = reshard(source, destination)
    old, new = await rt.group(4, Rank, axes={"tp": 4}), await rt.group(3, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    shards = await loaded(old, source, whole)
    await Refs([*shards]).gather().ready()
    before, here = await received(new), rt.traffic().payload
    moved = await plan.move(shards, to=new)
    for ref in moved:
        await ref.ready()
    after = await received(new)
    # The members' counts are those of the plan, and no plan can have less.
    assert tuple(b[1] - a[1] for a, b in zip(before, after, strict=True)) == plan.received
    assert plan.bytes == sum(plan.sent) == lower_bound(destination) == whole["w"].nbytes
    assert rt.traffic().payload == here
    await assert_has(new, destination, whole, moved)


async def test_a_member_that_is_being_restarted_gets_its_shard_when_it_is_up_and_not_through_this_process(
    rt: aiodaft.Runtime,
) -> None:
    source, destination = tp(2), tp(2, dim=1)
    policy = aiodaft.Restart(backoff=aiodaft.Backoff(base=0.2, jitter=0))
    old, new = await rt.group(2, Rank), await rt.on(restart=policy).group(2, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    shards = await loaded(old, source, whole)
    with pytest.raises(aiodaft.ActorDied):
        await new[1].end()
    here = rt.traffic().payload
    moved = await reshard(source, destination).move(shards, to=new)
    for ref in moved:
        await ref.ready()
    assert rt.traffic().payload == here
    assert (await rt.info(new[1])).restarts == 1
    await assert_has(new, destination, whole, moved)


@pytest.mark.parametrize("shared_runtime", ["shm", "tcp"], indirect=True)
async def test_replicas_pass_shards_on_and_no_process_sends_more_than_twice(rt: aiodaft.Runtime) -> None:
    source = tp(2)
    destination = Layout({"replica": 6}, {"w": Sharding(shape=(1024, 256), dtype=F32)})
    plan = reshard(source, destination, relays=True)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    nbytes = whole["w"].nbytes
    assert plan.sent == (nbytes, nbytes)
    assert plan.bytes == 6 * nbytes
    old, new = await rt.group(2, Rank), await rt.group(6, Rank)
    shards = await loaded(old, source, whole)
    await shards.gather().ready()
    here, before = rt.traffic().payload, await sent(old) + await sent(new)
    moved = await plan.move(shards, to=new)
    for ref in moved:
        await ref.ready()
    after = await sent(old) + await sent(new)
    # Of a half each to two, and of all to two: the third and the fourth have it of the first.
    assert [b - a for a, b in zip(before, after, strict=True)] == [nbytes, nbytes, 2 * nbytes, 2 * nbytes, 0, 0, 0, 0]
    assert rt.traffic().payload == here
    await assert_has(new, destination, whole, moved)


async def test_with_a_member_that_dies_those_fail_to_which_it_passes_its_shard(rt: aiodaft.Runtime) -> None:
    destination = Layout({"replica": 6}, {"w": Sharding(shape=(1024, 256), dtype=F32)})
    plan = reshard(tp(1), destination, relays=True)
    old, new = await rt.group(1, Rank), await rt.on(restart="temporary").group(6, Rank)
    shards = await loaded(old, tp(1), whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)}))
    await new[0].end_at_parcel(0)
    moved = await plan.move(shards, to=new)
    for ref in moved:
        await ref.ready()
    # The first one dies when it passes its shard on, to the third and the fourth.
    assert [place for place, ref in enumerate(moved) if isinstance(ref.exception(), aiodaft.ActorDied)] == [2, 3]
    assert [place for place, ref in enumerate(moved) if ref.exception() is None] == [0, 1, 4, 5]


async def test_stages_of_a_pipeline_get_their_layers(rt: aiodaft.Runtime) -> None:
    layers = {f"layer{i}": Sharding(shape=(256, 192), dtype=F32, dims={i % 2: "tp"}) for i in range(4)}
    norm = {"norm": Sharding(shape=(192,), dtype=torch.bfloat16)}
    source = Layout({"tp": 4}, layers | norm)
    staged = {
        name: Sharding(shape=one.shape, dtype=one.dtype, dims=one.dims, only={"pp": int(name[-1]) // 2})
        for name, one in layers.items()
    }
    # Both stages have the norm.
    destination = Layout({"pp": 2, "tp": 2}, staged | norm)
    assert destination.part("layer3", 0) is None
    assert destination.part("layer3", 3) == (slice(0, 256), slice(96, 192))
    old, new = await rt.group(4, Rank), await rt.group(4, Rank, axes={"pp": 2, "tp": 2})
    whole = whole_tensors(layers | norm)
    plan = reshard(source, destination)
    assert plan.bytes == lower_bound(destination)
    await assert_has(new, destination, whole, await plan.move(await loaded(old, source, whole), to=new))


async def test_replicas_share_the_sending_and_each_replica_gets_its_own(rt: aiodaft.Runtime) -> None:
    weights = {f"w{i}": Sharding(shape=(128, 96), dtype=F32, dims={0: "tp"}) for i in range(8)}
    source = Layout({"dp": 2, "tp": 2}, weights)
    destination = Layout({"tp": 3, "dp": 1}, weights)
    plan = reshard(source, destination)
    assert max(plan.sent) - min(plan.sent) <= 128 * 96 * 4
    old, new = await rt.group(4, Rank), await rt.group(3, Rank)
    whole = whole_tensors(weights)
    await assert_has(new, destination, whole, await plan.move(await loaded(old, source, whole), to=new))
    replicated = Layout({"dp": 3}, weights | {name: Sharding(shape=(128, 96), dtype=F32) for name in weights})
    spread = reshard(destination, replicated)
    assert spread.bytes == 3 * sum(tensor.nbytes for tensor in whole.values())
    again = await rt.group(3, Rank)
    await assert_has(again, replicated, whole, await spread.move(new.all(Rank.lend), to=again))


async def test_ranks_in_one_process_keep_what_they_have(rt: aiodaft.Runtime) -> None:
    source, destination = tp(4), tp(3)
    plan = reshard(source, destination, colocated=True)
    group = await rt.group(4, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    shards = await loaded(group, source, whole)
    # Rank 0 has 256 of its 342 rows, rank 1 has rows 342 to 512, rank 2 has 684 to 768.
    assert plan.received == tuple(KIB * rows for rows in (342 - 256, 342 - 170, 340 - 84))
    await Refs([*shards]).gather().ready()
    before = await received(group)
    moved = await plan.move(shards, to=group[:3])
    for ref in moved:
        await ref.ready()
    after = await received(group)
    assert tuple(b[1] - a[1] for a, b in zip(before, after, strict=True)) == (*plan.received, 0)
    await assert_has(group[:3], destination, whole, moved)


async def test_a_rank_has_its_old_shard_and_its_new_one_and_a_tensor_at_most_on_the_way(rt: aiodaft.Runtime) -> None:
    """All ranks send and receive at the same time, tensors of several sizes; lent shards are not copied."""
    shapes = {"a": (640, 512), "b": (64, 320), "c": (512, 512), "d": (30,)}
    rows = {name: Sharding(shape=shape, dtype=F32, dims={0: "tp"}) for name, shape in shapes.items()}
    columns = {name: Sharding(shape=shape, dtype=F32, dims={len(shape) - 1: "tp"}) for name, shape in shapes.items()}
    source, destination = Layout({"tp": 4}, rows), Layout({"tp": 4}, columns)
    plan = reshard(source, destination, colocated=True)
    group = await rt.group(4, Rank)
    whole = whole_tensors(rows)
    shards = await loaded(group, source, whole)
    moved = await plan.move(shards, to=group)
    for ref in moved:
        await ref.ready()
    sizes = {name: tensor.nbytes for name, tensor in whole.items()}
    # Parts that are written into place are not on the way: these two are too small for that.
    most_allowed = sizes["b"] + sizes["d"] if in_place() else max(sizes.values())
    assert all(0 < most <= most_allowed for most in await group.all(Rank.most_on_the_way))
    # Neither the old shards nor the new ones lie in a second place.
    assert await group.all(Rank.stored_bytes) == [0] * 4
    await assert_has(group, destination, whole, moved)


async def test_a_shard_is_opened_once_however_many_messages_its_parts_take(rt: aiodaft.Runtime) -> None:
    shardings = {f"w{i}": Sharding(shape=(512, 512), dtype=F32, dims={0: "tp"}) for i in range(4)}
    columns = {name: Sharding(shape=(512, 512), dtype=F32, dims={1: "tp"}) for name in shardings}
    source, destination = Layout({"tp": 2}, shardings), Layout({"tp": 2}, columns)
    plan, whole = reshard(source, destination), whole_tensors(shardings)
    old, new = await rt.group(2, Rank), await rt.group(2, Rank)
    await loaded(old, source, whole)
    for how in (Rank.lend, Rank.give):
        shards = old.all(how)
        await Refs([*shards]).gather().ready()
        await old.all(Rank.count_decoded)
        moved = await plan.move(shards, to=new)
        await assert_has(new, destination, whole, moved)
        # Once to compare it with its layout, and once for all parts.
        assert await old.all(Rank.decoded) == [2, 2]


async def test_every_kind_of_tensor_keeps_its_bits(rt: aiodaft.Runtime) -> None:
    kinds = {
        "scalar": Sharding(shape=(), dtype=torch.int64),
        "empty": Sharding(shape=(0, 4), dtype=F32, dims={1: "tp"}),
        "bf16": Sharding(shape=(9, 5), dtype=torch.bfloat16, dims={0: "tp"}),
        "fp8": Sharding(shape=(7, 3, 2), dtype=torch.float8_e4m3fn, dims={1: "tp"}),
        "bool": Sharding(shape=(11,), dtype=torch.bool, dims={0: "tp"}),
        "complex": Sharding(shape=(4, 4), dtype=torch.complex64, dims={1: "tp"}),
        "double": Sharding(shape=(3, 300, 50), dtype=torch.float64, dims={2: "tp"}, lengths={2: (1, 0, 49)}),
    }
    source = Layout({"tp": 3}, kinds)
    split = {
        name: Sharding(shape=one.shape, dtype=one.dtype, dims={0: "tp"} if one.shape else {})
        for name, one in kinds.items()
    }
    destination = Layout({"tp": 2}, split)
    whole = whole_tensors(kinds)
    whole["double"][0, 0, 0] = float("nan")
    whole["bf16"] = whole["bf16"].T.contiguous().T
    old, new = await rt.group(3, Rank), await rt.group(2, Rank)
    moved = await reshard(source, destination).move(await loaded(old, source, whole), to=new)
    await assert_has(new, destination, whole, moved)


async def test_a_plan_serves_many_moves_and_a_snapshot_is_what_it_was(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = tp(2, (64, 600)), tp(2, (64, 600), dim=1)
    plan = reshard(source, destination)
    monkeypatch.delattr("aiodaft.resharding.plan")
    old, new = await rt.group(2, Rank), await rt.group(2, Rank)
    whole = whole_tensors({"w": Sharding(shape=(64, 600), dtype=F32)})
    await loaded(old, source, whole)
    for _ in range(3):
        snapshot = old.all(Rank.give)
        await old.all(Rank.add, 1.0)
        moved = await plan.move(snapshot, to=new)
        await assert_has(new, destination, whole, moved)
        whole["w"] += 1.0


async def test_a_member_gets_the_tensors_themselves_and_another_process_gets_them_too(rt: aiodaft.Runtime) -> None:
    source, destination = tp(2), tp(1)
    old, new = await rt.group(2, Rank), await rt.group(1, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    moved = await reshard(source, destination).move(await loaded(old, source, whole), to=new)
    first, second = new[0].addresses(moved[0]), new[0].addresses(moved[0])
    assert await first == await second
    assert bits((await moved[0])["w"]) == bits(whole["w"])


async def test_shards_of_the_controller_go_to_a_group(rt: aiodaft.Runtime) -> None:
    """As after loading a checkpoint here; small ones and large ones."""
    for shape in ((8, 8), (1024, 256)):
        source, destination = tp(2, shape), tp(3, shape, dim=1)
        new = await rt.group(3, Rank)
        whole = whole_tensors({"w": Sharding(shape=shape, dtype=F32)})
        shards = Refs([rt.put(source.shard(whole, rank)) for rank in range(2)])
        await assert_has(new, destination, whole, await reshard(source, destination).move(shards, to=new))


WRONG = [
    ({}, ValueError, r"rank 1 of the source has no 'w'; its layout expects torch.float32 of shape \(2, 4\)"),
    (
        {"w": torch.zeros(2, 5)},
        ValueError,
        r"'w' in the shard of rank 1 of the source is torch.float32 of shape \(2, 5\)",
    ),
    (
        {"w": torch.zeros(2, 4).half()},
        ValueError,
        r"is torch.float16 of shape \(2, 4\); its layout expects torch.float32",
    ),
    (
        {"w": torch.zeros(2, 4), "v": torch.zeros(1)},
        ValueError,
        "rank 1 of the source has 'v', which its layout does not",
    ),
    ({"w": 3}, TypeError, "'w' in the shard of rank 1 of the source is int, and a plain tensor is expected"),
    ([1], TypeError, "the shard of rank 1 of the source is list, and a dict of tensors is expected"),
]


async def test_a_shard_that_is_not_as_its_layout_says_is_refused_before_anything_moves(rt: aiodaft.Runtime) -> None:
    old, new = await rt.group(2, Rank), await rt.group(1, Rank)
    plan = reshard(tp(2, (4, 4)), tp(1, (4, 4)))
    for wrong, error, message in WRONG:
        await old[0].load({"w": torch.zeros(2, 4)})
        await old[1].load(wrong)  # type: ignore[arg-type]  # some are no shards
        with pytest.raises(error, match=message):
            await plan.move(old.all(Rank.give), to=new)
    assert [*await old.all(Rank.most_on_the_way), *await new.all(Rank.most_on_the_way)] == [0, 0, 0]


async def test_a_move_that_does_not_fit_the_plan_is_refused(rt: aiodaft.Runtime) -> None:
    old, new = await rt.group(2, Rank), await rt.group(2, Rank, axes={"dp": 2})
    shards = await loaded(old, tp(2), whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)}))
    with pytest.raises(ValueError, match="there are 2 shards, and the layout has 3 ranks"):
        await reshard(tp(3), tp(2)).move(shards, to=new)
    with pytest.raises(ValueError, match="there are 2 members, and the layout has 3 ranks"):
        await reshard(tp(2), tp(3)).move(shards, to=new)
    with pytest.raises(ValueError, match="the group has axes {'dp': 2}, and the layout has {'tp': 2}"):
        await reshard(tp(2), tp(2)).move(shards, to=new)
    with pytest.raises(
        ValueError, match=r"colocated=True.*Rank-\d+\[0\] is in another process than the shard of rank 0"
    ):
        await reshard(tp(2), tp(2), colocated=True).move(shards, to=new[:])
    with pytest.raises(TypeError, match="must be Tensor"):
        await reshard(tp(2), tp(2)).move(old.all(Rank.add, None), to=old)  # type: ignore[arg-type]  # it fails


async def test_a_source_that_dies_on_the_way_fails_the_shards_that_need_it_and_no_other(rt: aiodaft.Runtime) -> None:
    """Rank 0 gets rows of source 0 alone, rank 1 those of source 1, which ends after its first parcel."""
    plan = reshard(tp(2), tp(2, (1024, 256)))
    old, new = await rt.group(2, Rank), await rt.group(2, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    shards = await loaded(old, tp(2), whole)
    await old[1].end_at_parcel(1)
    moved = await plan.move(shards, to=new)
    with pytest.raises(aiodaft.ActorDied, match=r"Rank-\d+\[1\] .*SIGKILL") as caught:
        await moved[1]
    assert "'w' was on its way from rank 1 of the source" in "".join(caught.value.__notes__)
    await new[0].load(moved[0])
    assert bits((await new[0].give())["w"]) == bits(whole["w"][:512])
    await new.all(Rank.most_on_the_way)
    assert await new.all(Rank.stored_bytes) == [0, 0]
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await plan.move(shards, to=new)


@pytest.mark.parametrize("when", ["before a parcel is copied", "while a parcel is copied"])
async def test_a_shard_that_its_actor_writes_to_on_the_way_is_a_snapshot_or_an_error(
    rt: aiodaft.Runtime, when: str
) -> None:
    plan = reshard(tp(2), tp(1))
    old, new = await rt.group(2, Rank), await rt.group(1, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    await loaded(old, tp(2), whole)
    for how in (Rank.give, Rank.lend):
        shards = old.all(how)
        await (old[0].hold_parcels() if when == "before a parcel is copied" else old[0].write_at_parcel())
        moved = await plan.move(shards, to=new)
        if when == "before a parcel is copied":
            await old[0].wait_asked()
            await old[0].add(1.0)
            await old[0].go_on()
        if how is Rank.lend:
            with pytest.raises(aiodaft.exceptions.BorrowError):
                await moved[0]
        else:
            await assert_has(new, tp(1), whole, moved)


async def test_a_new_shard_that_is_cancelled_on_the_way_leaves_nothing(rt: aiodaft.Runtime) -> None:
    plan = reshard(tp(2), tp(1))
    old, new = await rt.group(2, Rank), await rt.group(1, Rank)
    whole = whole_tensors({"w": Sharding(shape=(1024, 256), dtype=F32)})
    shards = await loaded(old, tp(2), whole)
    await old.all(Rank.hold_parcels)
    moved = await plan.move(shards, to=new)
    await old.all(Rank.wait_asked)
    assert moved[0].cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await moved[0]
    await old.all(Rank.go_on)
    del moved
    await new[0].blocks(0)
    await assert_has(new, tp(1), whole, await plan.move(shards, to=new))
    await old.all(Rank.most_on_the_way)
    await new.all(Rank.most_on_the_way)
