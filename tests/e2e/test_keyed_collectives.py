"""Collectives in the methods of a group, which meet by a key."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from enum import StrEnum
from functools import partial, reduce
from http import HTTPStatus
from typing import Any

import pytest
import torch
from collective_actors import longest, made
from keyed_members import Keyer, Unsaid
from supervised import AT_ONCE
from torch import Tensor

import aiodaft
from aiodaft import ActorDied, CallCancelled, GroupChanged, Restart
from aiodaft._protocol.connections.session import WINDOW_BYTES
from aiodaft.exceptions import SerializationError

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Small ones travel with the messages. Of 68 KB, those to be reduced go to one member, others from member to member, as
# all of 1.4 MB do. Members cannot divide them evenly.
SHAPES = [(7, 2), (131, 131), (601, 601)]


class Text(StrEnum):
    X = "x"


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


def values(shape: tuple[int, ...], count: int) -> list[Tensor]:
    return [made(rank, *shape) for rank in range(count)]


def in_order(shape: tuple[int, ...], count: int, combine: Any = torch.add) -> Tensor:
    total: Tensor = reduce(combine, values(shape, count))
    return total


async def errors_of(refs: Any) -> list[BaseException]:
    found = await asyncio.gather(*refs, return_exceptions=True)
    assert all(isinstance(error, BaseException) for error in found), found
    return found


async def begin(group: aiodaft.Group[Keyer], ranks: list[int], operation: str, *args: Any, key: Any) -> None:
    """Some members take part. Returns when one of them has come to the member where they meet."""
    before = sum(await group.all(Keyer.meetings))
    for rank in ranks:
        await group[rank].begin(operation, *args, key=key)
    while sum(await group.all(Keyer.meetings)) == before:
        await asyncio.sleep(0)


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_collective_equals_local_torch(rt: aiodaft.Runtime, shape: tuple[int, ...]) -> None:
    group = await rt.group(3, Keyer)
    total = in_order(shape, 3)
    for found in await group.all(Keyer.on_tensor, "all_reduce", shape):
        assert torch.equal(found, total)
    for found in await group.all(Keyer.on_tensor, "all_reduce", shape, op="max", key="largest"):
        assert torch.equal(found, in_order(shape, 3, torch.maximum))
    first, second, third = await group.all(Keyer.on_tensor, "reduce", shape, root=1)
    assert (first, third) == (None, None)
    assert torch.equal(second, total)
    scattered = await group.all(Keyer.on_tensor, "reduce_scatter", shape, key=("rows", 1))
    for part, rows in zip(scattered, torch.tensor_split(total, 3), strict=True):
        assert torch.equal(part, rows)
    for gathered in await group.all(Keyer.on_tensor, "all_gather", shape):
        assert all(map(torch.equal, gathered, values(shape, 3)))
    first, second, third = await group.all(Keyer.on_tensor, "gather", shape, root=2)
    assert (first, second) == (None, None)
    assert all(map(torch.equal, third, values(shape, 3)))
    for found in await group.all(Keyer.on_tensor, "broadcast", shape, root=1):
        assert torch.equal(found, made(1, *shape))
    for rank, found in enumerate(await group.all(Keyer.do, "scatter", values(shape, 3), root=2)):
        assert torch.equal(found, made(rank, *shape))
    for rank, exchanged in enumerate(await group.all(Keyer.do, "all_to_all", values(shape, 3))):
        assert all(torch.equal(item, made(rank, *shape)) for item in exchanged)
    assert await group.all(Keyer.do, "barrier") == [None] * 3


async def test_a_member_may_have_a_method_of_any_name(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    assert await group.each(Keyer.handle, ["a", "b"]) == ["b", "a"]
    assert await group.all(Keyer.do, "all_reduce", 1) == [2, 2]
    await group.remove(group[1])
    assert len(group) == 1


async def test_numbers_functions_and_values_of_different_sizes(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Keyer)
    words = ["to", "thine", "own"]
    assert await group.all(Keyer.do, "all_reduce", 2.5, "product") == [2.5**3] * 3
    found = [member.do("all_reduce", word, longest) for member, word in zip(group, words, strict=True)]
    assert await asyncio.gather(*found) == ["thine"] * 3
    # One comes with the message, one as a ref.
    sizes = [member.do("all_gather", bytes(size)) for member, size in zip(group, [1, 200_000, 0], strict=True)]
    for gathered in await asyncio.gather(*sizes):
        assert list(map(len, gathered)) == [1, 200_000, 0]
    assert await (await rt.group(1, Keyer))[0].do("all_reduce", 5) == 5


async def test_methods_of_threads_wait_with_result(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    for shape in SHAPES:
        for found in await group.all(Keyer.do_in_thread, "all_reduce", torch.ones(shape)):
            assert torch.equal(found, torch.full(shape, 2.0))


async def test_a_member_may_write_to_its_value_and_its_result_when_that_is_there(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Keyer)
    for size in (10, 1_000_000):
        assert await group.all(Keyer.write_after, size) == [2.0 * size, 3.0 * size, 1.0 * size]
    for size, writer in itertools.product((1 << 16, 1 << 19), range(3)):
        found = await group.all(Keyer.write_to_result, "all_reduce", size, writer)
        assert found == [{106.0 if rank == writer else 6.0} for rank in range(3)]


async def test_members_in_one_process_share_no_values_and_no_results(rt: aiodaft.Runtime) -> None:
    group = await rt.on(with_=await rt.spawn(aiodaft.Actor)).group(2, Keyer)
    expected = {"all_reduce": {3.0}, "all_gather": {1.0, 2.0}, "broadcast": {1.0}, "reduce_scatter": {3.0}}
    for size, operation in itertools.product((10, 1 << 16, 1 << 19), expected):
        assert (await group.all(Keyer.write_to_result, operation, size, 0))[1] == expected[operation]


async def test_a_member_without_a_result_may_write_to_its_value_when_its_wait_is_over(rt: aiodaft.Runtime) -> None:
    # Each member reduces a part, of its own value in place.
    group = await rt.group(3, Keyer)
    for _ in range(5):
        assert await group.all(Keyer.write_after_reduce, 1_000_000) == [[3.0], [], []]


async def test_keys_meet_in_any_order_and_parts_of_a_group_by_themselves(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Keyer, axes={"a": 2, "b": 2})
    calls = [(key, repr(key)) for key in ("x", 7, ("layer", 3), ("layer", ("inner", 4)))]
    orders = [calls, calls[::-1], calls[2:] + calls[:2], calls]
    found = [member.several(order, at_once=True) for member, order in zip(group, orders, strict=True)]
    for order, lists in zip(orders, await asyncio.gather(*found), strict=True):
        assert lists == [[value] * 4 for _, value in order]
    assert await group.all(Keyer.along, "a", "x") == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert await group.all(Keyer.along, "b", "x") == [[0, 1], [0, 1], [2, 3], [2, 3]]


async def test_the_calls_of_a_member_with_one_key_belong_to_the_others_in_their_order(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    for key in ("same", None):
        # One member is ahead of the other.
        ahead = group[0].several([(key, turn) for turn in range(5)], at_once=True)
        behind = group[1].several([(key, turn) for turn in range(5)], at_once=False)
        assert await ahead == await behind == [[turn, turn] for turn in range(5)]


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("late", ["1", "no number"])
async def test_the_order_of_calls_counts_also_if_the_value_of_the_first_comes_later(
    rt: aiodaft.Runtime, late: str, gives_up: bool
) -> None:
    group = await rt.group(2, Keyer)
    await group[0].begin_late("x")
    first, second = (group[1].do("all_gather", number, key="x") for number in (1, 2))
    if gives_up:
        await group[0].give_up("late")
    await group[1].send(late, 0)
    if gives_up:
        with pytest.raises(CallCancelled, match=r"all_gather 'x' of .*: rank 0 has left it: its wait .* was cancelled"):
            await first
    elif late == "1":
        assert await first == [1, 1]
    else:
        with pytest.raises(ValueError, match="the value of rank 0 cannot be used: invalid literal"):
            await first
    assert await second == await group[0].finish("next") == [2, 2]
    assert await group.all(Keyer.meetings) == [0, 0]


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ((("all_reduce", torch.zeros(3)), ("all_reduce", torch.zeros(4))), "value torch.float32 (3,)"),
        ((("all_reduce", torch.zeros(3)), ("all_reduce", torch.zeros(3).double())), "value torch.float32 (3,)"),
        ((("all_reduce", 1), ("all_reduce", 1, "max")), "op sum"),
        ((("all_reduce", 1), ("all_gather", 1)), "operation all_reduce"),
    ],
)
async def test_members_that_disagree_all_get_an_error(rt: aiodaft.Runtime, calls: Any, why: str) -> None:
    group = await rt.group(3, Keyer)
    usual, other = calls
    for key in ("loss", None):
        refs = [member.do(*(other if rank == 1 else usual), key=key) for rank, member in enumerate(group)]
        for error in await errors_of(refs):
            assert isinstance(error, ValueError)
            what = "" if key is None else " 'loss'"
            assert f"{what} of {group.id}: the members disagree: rank " in str(error)
            assert "rank 1 has" in str(error)
            assert f"rank 0 has {why}" in str(error) or f"rank 2 has {why}" in str(error)
    assert await group.all(Keyer.do, "all_reduce", 1, key="loss") == [3] * 3


async def test_roots_that_differ_and_values_that_cannot_be_cut_or_sent(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    for error in await errors_of([member.do("reduce", 1, root=rank, key="r") for rank, member in enumerate(group)]):
        assert "rank 0 has root 0" in str(error)
        assert "rank 1 has root 1" in str(error)
    for error in await errors_of([member.do("all_to_all", [1, 2, 3], key="exchange") for member in group]):
        assert isinstance(error, ValueError)
        assert f"all_to_all 'exchange' of {group.id}: expected a list or tuple of 2 items, not of 3" in str(error)
    await group[0].begin("all_gather", 1, key="lock")
    with pytest.raises(TypeError, match="lock"):
        await group[1].gather_lock("lock")
    with pytest.raises(ValueError, match=r"all_gather 'lock' of .*: the value of rank 1 cannot be used: .*lock"):
        await group[0].finish("lock")


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_member_that_cannot_take_part_is_named_at_the_others(rt: aiodaft.Runtime, failing: int) -> None:
    group = await rt.group(2, Keyer)
    member, other = group[failing], group[1 - failing]
    for call, kind in ((member.reduce_failed_call, KeyError), (member.reduce_shapeless, RuntimeError)):
        waiting = other.do("all_reduce", 1, key="reduce")
        with pytest.raises(kind):
            await call("reduce")
        with pytest.raises(ValueError, match=f"all_reduce 'reduce' of .*: the value of rank {failing} cannot be used"):
            await waiting
    assert await group.all(Keyer.do, "all_reduce", 1, key="reduce") == [2, 2]


async def test_an_op_that_cannot_travel_fails_at_all(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Keyer)
    for error in await errors_of([member.reduce_by_lock("reduce") for member in group]):
        assert isinstance(error, TypeError | ValueError)
    assert await group.all(Keyer.do, "all_reduce", 2, partial(max), key="reduce") == [2, 2, 2]


async def test_keys_that_are_equal_meet_whatever_their_types(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Keyer)
    keys = [(200, "x"), (HTTPStatus.OK, "x"), (200, Text.X)]
    refs = [member.do("all_gather", rank, key=key) for rank, (member, key) in enumerate(zip(group, keys, strict=True))]
    assert [await ref for ref in refs] == [[0, 1, 2]] * 3


async def test_members_that_are_late_are_named_at_all(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    why = f"barrier 'late' of {group.id}: rank 1 of 2 did not come in 0.05 s"
    with pytest.raises(TimeoutError, match=why):
        await group[0].do("barrier", key="late", timeout=0.05)
    # The late one hears of it, and the next round is not mixed up with this one.
    again = group[0].do("barrier", key="late")
    with pytest.raises(TimeoutError, match=why):
        await group[1].do("barrier", key="late")
    await group[1].do("barrier", key="late")
    await again


async def test_a_timeout_also_ends_the_wait_for_the_member_where_all_meet(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    # With this key they meet at rank 1.
    with pytest.raises(TimeoutError, match="rank 1, where the members meet for this key, did not answer in 0.05 s"):
        await group[0].freeze_other(await group[1].pid(), 0)
    assert await group.all(Keyer.do, "all_reduce", 1, key="next") == [2, 2]


@pytest.mark.parametrize("has_come", [False, True])
@pytest.mark.parametrize("dies", [0, 1, 2])
async def test_a_death_ends_the_waiting_of_all_and_is_named(rt: aiodaft.Runtime, dies: int, has_come: bool) -> None:
    # Without a restart, so that its scope does not fail.
    group = await rt.on(restart=Restart("temporary")).group(3, Keyer)
    others = [rank for rank in range(3) if rank != dies]
    # Keys meet at all members.
    keys = list(range(5))
    for key in keys:
        await begin(group, [others[0], *([dies] if has_come else [])], "all_reduce", torch.ones(100), key=key)
    with pytest.raises(ActorDied):
        await group[dies].die()
    for key in keys:
        with pytest.raises(ActorDied) as early:
            await group[others[0]].finish(key)
        with pytest.raises(ActorDied) as late:
            await group[others[1]].do("all_reduce", torch.ones(100), key=key)
        for info in (early, late):
            assert f"rank {dies} of {group.id}" in str(info.value.__notes__)
            assert f"raised for all_reduce {key} of {group.id}" in str(info.value.__notes__)


@pytest.mark.parametrize("dies", [0, 1, 2])
async def test_after_a_restart_members_begin_anew(rt: aiodaft.Runtime, dies: int) -> None:
    group = await rt.on(restart=Restart(intensity=9, backoff=AT_ONCE)).group(3, Keyer)
    early, late = (rank for rank in range(3) if rank != dies)
    keys = list(range(5))
    for key in keys:
        await begin(group, [early], "all_gather", early, key=key)
    with pytest.raises(ActorDied):
        await group[dies].die()
    for key in keys:
        with pytest.raises((ActorDied, GroupChanged)):
            await group[early].finish(key)
    for key in keys:
        gathered = await asyncio.gather(*(group[rank].do("all_gather", rank, key=key) for rank in range(3)))
        assert gathered == [[0, 1, 2]] * 3
    assert group.epoch == 2
    with pytest.raises(GroupChanged, match=r"this barrier is of epoch 1; use what current_group\(\) gives now"):
        await group[late].do_early("barrier")


async def test_what_members_do_again_after_a_death_never_meets_what_the_dead_one_has_done(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=Restart(intensity=99, backoff=AT_ONCE)).group(3, Keyer)
    for turn in range(9):
        dies = turn % 3
        # The one that dies has come to some of the keys, others to some before and to some after.
        tries = [group[rank].until_done(range(5), turn, rank) for rank in range(3) if rank != dies]
        await group[dies].begin("all_gather", ("before", dies), key=turn % 5)
        with pytest.raises(ActorDied):
            await group[dies].die()
        tries.insert(dies, group[dies].until_done(range(5), turn, dies))
        assert await asyncio.gather(*tries) == [[[(turn, rank) for rank in range(3)]] * 5] * 3


async def test_a_member_that_is_stopped_is_named(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Keyer)
    keys = list(range(5))
    for key in keys:
        await begin(group, [0], "barrier", key=key)
    await rt.stop(group[1])
    for key in keys:
        with pytest.raises(ActorDied):
            await group[0].finish(key)
        with pytest.raises(ActorDied):
            await group[2].do("barrier", key=key)


async def test_a_new_epoch_ends_what_is_open(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    keys = list(range(5))
    for key in keys:
        await begin(group, [0], "barrier", key=key)
    await group.resize(3)
    for key in keys:
        with pytest.raises(GroupChanged, match=r"has changed: this is of epoch 1, it has epoch 2 now") as raised:
            await group[0].finish(key)
        assert raised.value.group == group.id
    with pytest.raises(
        GroupChanged, match=r"this barrier is of epoch 1; use what current_group\(\) gives now"
    ) as early:
        await group[1].do_early("barrier")
    assert early.value.group == group.id
    assert await group.all(Keyer.do, "all_reduce", 1, key=0) == [3] * 3


async def test_after_a_renewal_the_calls_of_a_key_count_anew(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    keys = list(range(5))
    for key in keys:
        await begin(group, [0], "all_gather", "one ahead", key=key)
    await group.renew()
    assert group.epoch == 2
    for key in keys:
        with pytest.raises(GroupChanged):
            await group[0].finish(key)
    for key in keys:
        assert await group.all(Keyer.do, "all_gather", "after", key=key) == [["after"] * 2] * 2


@pytest.mark.parametrize("fails", ["before", "between"])
async def test_when_a_member_fails_the_others_of_that_call_do_not_wait_for_it(rt: aiodaft.Runtime, fails: str) -> None:
    group = await rt.group(3, Keyer)
    for rank in range(3):
        with pytest.raises(ExceptionGroup) as info:
            await group.each(Keyer.gather_unless, [fails if rank == other else "" for other in range(3)])
        assert sorted(type(error).__name__ for error in info.value.exceptions) == ["CallCancelled"] * 2 + ["ValueError"]
        for error in info.value.exceptions:
            assert isinstance(error, ValueError) or f"[{rank}] failed: ValueError: a bad batch" in str(error)
        # Nobody is one call behind the others.
        assert await group.all(Keyer.gather_unless, "") == [[""] * 6] * 3
    assert await group.all(Keyer.meetings) == [0, 0, 0]


async def test_if_a_call_cannot_be_made_the_other_members_do_not_wait_for_it(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Keyer, axes={"dp": 2, "tp": 2})
    unsendable = threading.Lock()
    for _ in range(2):
        with pytest.raises(SerializationError, match=r"gather_unless cannot travel to .*\[3\]"):
            group.each(Keyer.gather_unless, ["", "", "", unsendable])
        with pytest.raises(SerializationError, match=r"gather_unless cannot travel to .*\[2\]"):
            group.along("dp").each(Keyer.gather_unless, ["", unsendable])
    while any(await group.all(Keyer.meetings)):
        await asyncio.sleep(0)
    assert await group.all(Keyer.gather_unless, "") == [[""] * 8] * 4


async def test_a_call_that_was_not_sent_yet_hears_that_another_one_of_the_group_failed(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    # Its argument leaves no room for others.
    held = group[1].do("scatter", torch.zeros(WINDOW_BYTES // 4 + 1), key="held")
    refs = group.each(Keyer.gather_unless, ["before", ""])
    with pytest.raises(ValueError, match="bad batch"):
        await refs[0]
    assert await group[0].do("scatter", ["first", "second"], key="held") == "first"
    assert await held == "second"
    with pytest.raises(CallCancelled, match="bad batch"):
        await refs[1]


@pytest.mark.parametrize("fails", ["before", "between"])
async def test_when_a_step_of_a_graph_fails_the_others_do_not_wait_for_it(rt: aiodaft.Runtime, fails: str) -> None:
    group = await rt.group(3, Keyer)

    def gather(a: Any, b: Any, c: Any) -> Any:
        return group[0].count(*group.each(Keyer.gather_unless, [a, b, c]))

    async with aiodaft.compile(gather) as graph:
        for rank in range(3):
            with pytest.raises((ValueError, CallCancelled)) as info:
                await graph(*(fails if rank == other else "" for other in range(3)))
            assert "ValueError: a bad batch" in f"{info.type.__name__}: {info.value}"
            assert await graph("", "", "") == 3
    assert await group.all(Keyer.meetings) == [0, 0, 0]


@pytest.mark.parametrize("joined", [False, True])
async def test_when_a_step_of_a_graph_dies_the_others_do_not_wait_for_it(rt: aiodaft.Runtime, joined: bool) -> None:
    group = await rt.on(restart=Restart(intensity=9, backoff=AT_ONCE)).group(2, Keyer)

    def gather(a: Any, b: Any) -> Any:
        # The value of the dead one goes to the owner, or to the other member.
        found = group.each(Keyer.gather_after_death, [a, b])
        return group[0].count(*found) if joined else tuple(found)

    async with aiodaft.compile(gather) as graph:
        results = graph(False, True)
        for result in [results] if joined else results:
            with pytest.raises(ActorDied):
                await result
    assert await group.all(Keyer.meetings) == [0, 0]


async def test_an_error_whose_text_cannot_be_made_is_told_too(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    with pytest.raises(ExceptionGroup, match="2 members failed"):
        await group.each(Keyer.gather_unless, ["", "without a text"])
    async with aiodaft.compile(lambda a, b: group[0].count(*group.each(Keyer.gather_unless, [a, b]))) as graph:
        with pytest.raises((Unsaid, CallCancelled)):
            await graph("", "without a text")
        assert await graph("", "") == 2


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_when_a_member_fails_the_threads_of_the_others_go_on(rt: aiodaft.Runtime, timeout: float | None) -> None:
    group = await rt.group(2, Keyer)
    with pytest.raises(ExceptionGroup, match="2 members failed"):
        await group.each(Keyer.gather_in_thread_unless, ["", "fails"], timeout)
    assert await group.all(Keyer.meetings) == [0, 0]
    assert await group.all(Keyer.gather_in_thread_unless, "", timeout) == [["", ""]] * 2


async def test_a_call_that_is_cancelled_has_not_taken_part(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    for in_thread in (False, True):
        do = group[0].do_in_thread if in_thread else group[0].do
        waiting = do("all_gather", "cancelled", key="x")
        while not sum(await group.all(Keyer.meetings)):
            await asyncio.sleep(0)
        waiting.cancel()
        while sum(await group.all(Keyer.meetings)):
            await asyncio.sleep(0)
        assert await group.all(Keyer.do, "all_gather", "again", key="x") == [["again"] * 2] * 2


async def test_after_a_call_that_is_cancelled_the_next_one_of_the_member_counts(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Keyer)

    async def until_open(count: int) -> None:
        while sum(await group.all(Keyer.meetings)) != count:
            await asyncio.sleep(0)

    other = group[2].do("all_gather", "other", key="x")
    await until_open(1)
    cancelled, following = (group[1].do("all_gather", what, key="x") for what in ("cancelled", "following"))
    await until_open(2)
    cancelled.cancel()
    await until_open(1)
    last = group[0].do("all_gather", "last", key="x")
    assert await last == await other == await following == ["last", "following", "other"]


async def test_a_thousand_rounds_leave_nothing(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    assert await group.all(Keyer.rounds, 980, 10) == [1960.0] * 2
    assert await group.all(Keyer.rounds, 20, 100_000) == [40.0] * 2
    while any(map(any, left := await group.all(Keyer.left))):
        # Values that are not needed any more are freed soon.
        await asyncio.sleep(0)
    assert left == [(0, 0, 0)] * 2


async def test_a_stack_says_who_waits_for_which_collective(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    await begin(group, [0], "barrier", key="stuck")
    waiting = group[0].finish("stuck")
    shown = str(await rt.stack())
    assert f"waits for barrier 'stuck' of {group.id}" in shown
    assert f"  barrier 'stuck' of {group.id}: rank 1 of 2 has not come" in shown
    await group[1].do("barrier", key="stuck")
    await waiting


async def test_wrong_arguments_are_refused_at_the_line(rt: aiodaft.Runtime) -> None:
    member = (await rt.group(1, Keyer))[0]
    with pytest.raises(TypeError, match=r"key=1.5: a key is a string, an integer, or a tuple of these"):
        await member.do("barrier", key=1.5)
    with pytest.raises(TypeError, match=r"key=\('x', None\): a key is"):
        await member.do("barrier", key=("x", None))
    with pytest.raises(ValueError, match="root is the rank of one of 1 members, from 0, not 1"):
        await member.do("reduce", 1, root=1)
    with pytest.raises(ValueError, match="timeout=-1: seconds, not negative"):
        await member.do("barrier", timeout=-1)
    with pytest.raises(ValueError, match="op is one of sum, product, min, max, or a function"):
        await member.do("all_reduce", 1, "avg")
    with pytest.raises(TypeError, match="reduce_scatter of .*: expected a tensor or an array to be cut, not int"):
        await member.do("reduce_scatter", 1)


async def test_threads_of_an_actor_take_part_for_the_call_that_has_asked_for_the_group(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keyer)
    assert await group.all(Keyer.do_beside, "all_reduce", 3) == [6, 6]
    # In one call of the group: the thread of one meets the coroutine of the other only if both belong to that.
    refs = group.each(Keyer.do_beside, ["all_gather"] * 2, "a")
    assert await group.all(Keyer.do, "all_gather", "b") == [["b", "b"]] * 2
    assert await refs == [["a", "a"]] * 2


async def test_ranks_make_a_part_of_a_group_in_their_order(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Keyer)
    first, _, _, last = await asyncio.gather(
        group[0].do_in_part([[3, 0]], "all_gather", "a"),
        group[1].do_in_part([[1, 2]], "all_gather", "c"),
        group[2].do_in_part([[1, 2]], "all_gather", "d"),
        group[3].do_in_part([[3, 0]], "all_gather", "b"),
    )
    assert (first, last) == (("3:-3:-3", 1, ["b", "a"]), ("3:-3:-3", 0, ["b", "a"]))
    # A part of a part, by the ranks in that.
    ends = [group[rank].do_in_part([[0, 1, 3], [2, 0]], "all_reduce", rank) for rank in (0, 3)]
    assert await asyncio.gather(*ends) == [("0,1,3/2:-2:-2", 1, 3), ("0,1,3/2:-2:-2", 0, 3)]
    for ranks, wrong in (
        ([1, 1, 0], "different ranks"),
        ([0, 4], "from 0 to 3"),
        ([1, 2], "is none of them"),
        ([], "none of"),
    ):
        with pytest.raises(ValueError, match=wrong):
            await group[0].do_in_part([ranks], "barrier")


@pytest.mark.parametrize("shape", SHAPES)
async def test_results_are_written_where_the_member_wants_them(rt: aiodaft.Runtime, shape: tuple[int, ...]) -> None:
    group = await rt.group(2, Keyer)
    empty = torch.zeros(shape)
    for is_there, out in await group.each(Keyer.sum_into, values(shape, 2)):
        assert is_there
        assert torch.equal(out, in_order(shape, 2))
    for is_there, out in await group.all(Keyer.do_into, "all_gather", made(7, *shape), [empty, empty.clone()]):
        assert is_there
        assert all(torch.equal(one, made(7, *shape)) for one in out)
    for refs in (
        group.all(Keyer.do_into, "all_reduce", empty, torch.zeros(3)),
        group.all(Keyer.do_into, "all_gather", empty, [empty]),
        group.all(Keyer.do_into, "all_reduce", 1, torch.zeros(3)),
    ):
        for error in await errors_of(refs):
            assert "out has to be of the kind of the result" in str(error)


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_parts_of_a_reduce_scatter_may_have_any_lengths(rt: aiodaft.Runtime, shape: tuple[int, ...]) -> None:
    group = await rt.group(3, Keyer)
    # As DTensor and `chunk` cut 7 rows: 3, 3, 1.
    lengths = [len(part) for part in torch.empty(shape).chunk(3)]
    parts = await group.all(Keyer.on_tensor, "reduce_scatter", shape, lengths=lengths)
    assert list(map(len, parts)) == lengths
    assert torch.equal(torch.cat(parts), in_order(shape, 3))
    for wrong, says in (
        ([1, 2, 1], "are not those of parts of"),
        ([1, 2], "of the parts of 3 members"),
        ([9, -1, 1], "3 members"),
    ):
        for error in await errors_of(group.all(Keyer.on_tensor, "reduce_scatter", (7, 2), lengths=wrong)):
            assert says in str(error)
    each = group.each(Keyer.on_lengths, [[3, 3, 1], [3, 3, 1], [1, 3, 3]])
    for error in await errors_of(each):
        assert re.search(r"the members disagree: .*rank \d has lengths \(\d, 3, \d\)", str(error))
