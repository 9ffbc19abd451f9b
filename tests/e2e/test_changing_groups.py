"""Groups whose members die, join and leave (rows GC4, GC6)."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from elastic import Laborer, Loner, Peer, Plain
from inside import agent_of, miss_the_members

import aiodaft
from aiodaft import ActorDied, Group, Restart
from aiodaft.policies import Load
from aiodaft.testing import Faults, in_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def kill(group: Group[Peer], *ranks: int) -> None:
    """Return before this process can know of the deaths."""
    for pid in await asyncio.gather(*(group[rank].pid() for rank in ranks)):
        os.kill(pid, signal.SIGKILL)


def mortals(rt: aiodaft.Runtime) -> aiodaft.typing.Placement:
    """Their death is no error of the runtime."""
    return rt.on(restart="temporary")


async def test_heal_leaves_out_the_dead_and_the_others_close_ranks(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt).group(4, Peer)
    before = list(group)
    assert await group.heal() == []
    assert group.epoch == 1
    await kill(group, 0, 2)
    assert await group.heal() == [0, 2]
    assert list(group) == [before[1], before[3]]
    assert [(rank, size) for _, rank, size in await group.all(Peer.seat)] == [(0, 2), (1, 2)]
    await kill(group, 0, 1)
    assert await group.heal() == [0, 1]
    assert (len(group), group.epoch) == (0, 3)


async def test_the_first_calls_to_new_members_find_that_these_know_the_group(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt).group(1, Peer)
    async with asyncio.TaskGroup() as tasks:
        growing = tasks.create_task(group.resize(3))
        while not growing.done():
            for _, rank, size in await group.all(Peer.seat):
                assert (rank, size) == (0, 1) or size == 3
    await group.resize(0)


async def test_members_come_and_go_while_a_call_of_another_is_under_way(rt: aiodaft.Runtime) -> None:
    group = await rt.group(1, Peer)
    held = group[0].held()
    # Neither change waits for the call: that would be for ever.
    await group.resize(3)
    await group.resize(1)
    assert not held.done()
    await group[0].open()
    assert await held == 0


async def test_members_without_a_policy_are_left_out_and_give_back_what_they_had(rt: aiodaft.Runtime) -> None:
    group = await rt.on(gpus=2).group(2, Peer)
    with pytest.raises(ActorDied, match="SIGKILL"):
        await group[1].die()
    assert await group.heal(2) == [1]
    assert [(rank, size) for _, rank, size in await group.all(Peer.seat)] == [(0, 2), (1, 2)]
    await rt.stop(group[0])
    assert await group.heal() == [0]
    assert await group.all(Peer.seat) == [(3, 0, 1)]


async def test_heal_does_not_wait_for_values_of_the_controller() -> None:
    async with aiodaft.Runtime(preload=(), stop_grace=1000) as rt:
        group, other = await mortals(rt).group(2, Peer), await rt.spawn(Loner)
        value = rt.put(bytes(MIB))
        assert await other.size(value) == MIB
        await kill(group, 1)
        assert await group.heal() == [1]
        assert len(await value) == MIB


async def test_members_that_replace_the_dead_get_their_ranks_and_places(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt).group(4, Peer, axes={"dp": 2, "tp": 2})
    before = list(group)
    await kill(group, 1)
    with pytest.raises(ValueError, match=r"axes dp=2 x tp=2 do not fit 3 members: give the new ones by `axes="):
        await group.heal()
    assert (list(group), group.epoch) == (before, 1)
    assert await group.heal(6) == [1]
    assert [group[rank] for rank in (0, 2, 3)] == [before[rank] for rank in (0, 2, 3)]
    assert await group.all(Peer.coords) == [{"dp": rank // 2, "tp": rank % 2} for rank in range(6)]
    assert await group[1].load(None) == 1
    await kill(group, 1, 2, 5)
    # Fewer than before: the others close ranks, and a new one comes last.
    assert await group.heal(4, axes={"pp": 4}) == [1, 2, 5]
    assert list(group)[:3] == [before[0], before[3], list(group)[2]]
    assert await group.all(Peer.coords) == [{"pp": rank} for rank in range(4)]


async def test_a_member_that_is_restarted_is_not_gone(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=Restart()).group(2, Peer)
    await kill(group, 1)
    assert await group.heal() == []
    assert [(rank, size) for _, rank, size in await group.all(Peer.seat)] == [(0, 2), (1, 2)]


async def test_new_members_take_over_the_state_of_others_before_they_are_in_the_group(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Peer, bytes(4 * MIB))
    busy = group[1].held()
    seen: list[object] = []

    async def prepare(new: list[Peer]) -> None:
        seen.append((len(new), len(group), group.epoch, new[0] in group))
        # The work of the others goes on, and no call of the group goes to the new ones.
        seen.append({await group.any(Peer.size_of_state) for _ in range(8)})
        state = group[0].get()
        seen.append(await asyncio.gather(*(one.load(aiodaft.typing.lazy(state)) for one in new)))

    before = rt.traffic()
    await group.resize(4, prepare=prepare)
    moved = rt.traffic().payload_received - before.payload_received
    assert seen == [(2, 2, 1, False), {4 * MIB}, [2, 3]]
    assert moved == 0
    assert await group.all(Peer.size_of_state) == [4 * MIB] * 4
    assert not busy.done()
    await group[1].open()
    assert await busy == 1


async def test_new_members_that_cannot_be_prepared_are_taken_back(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Peer)
    made: list[Peer] = []
    begun = asyncio.Event()

    async def fails(new: list[Peer]) -> None:
        made.extend(new)
        raise LookupError("no state")

    async def waits(new: list[Peer]) -> None:
        made.extend(new)
        begun.set()
        await new[0].held()

    with pytest.raises(LookupError, match="no state"):
        await group.resize(4, prepare=fails)
    waiting = asyncio.get_running_loop().create_task(group.heal(3, prepare=waits))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (len(made), len(group), group.epoch) == (3, 2, 1)
    assert len(await agent_of(rt).processes()) == 2
    for member in made:
        with pytest.raises(ActorDied):
            await member.pid()
    await group.resize(3)
    assert await group.all(Peer.seat) == [(4, rank, 3) for rank in range(3)]


async def test_what_prepares_new_members_cannot_change_the_group(rt: aiodaft.Runtime) -> None:
    group, other = await rt.group(1, Peer), await rt.group(1, Peer)

    async def prepare(new: list[Peer]) -> None:
        await other.resize(2)
        with pytest.raises(RuntimeError, match="is being changed, and its `prepare` cannot change it"):
            await group.resize(5)

    await group.resize(2, prepare=prepare)
    assert (len(group), len(other)) == (2, 2)


async def test_a_resize_that_is_cancelled_while_members_are_told_has_happened(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Peer)
    stopped = await group[1].pid()
    os.kill(stopped, signal.SIGSTOP)
    resizing = asyncio.get_running_loop().create_task(group.resize(3))
    while len(group) == 2:
        await asyncio.sleep(0)
    resizing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resizing
    os.kill(stopped, signal.SIGCONT)
    # They are told nevertheless.
    while await group.all(Peer.seat) != [(2, rank, 3) for rank in range(3)]:
        pass


async def test_some_members_are_removed_and_the_others_close_ranks(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Peer)
    before = list(group)
    await group.remove(group[0], *group[2:3])
    assert list(group) == [before[1], before[3]]
    assert [(rank, size) for _, rank, size in await group.all(Peer.seat)] == [(0, 2), (1, 2)]
    with pytest.raises(ActorDied, match="stopped by its owner"):
        await before[0].pid()
    with pytest.raises(ValueError, match=r"is no member of <Group of 2 Peer>"):
        await group.remove(before[0])
    await group.remove()
    assert group.epoch == 2
    for part in (group[:1], group.with_policy(aiodaft.policies.nearest)):
        with pytest.raises(TypeError, match="only the group that `rt.group` gave can be changed"):
            await part.remove(group[0])
    with pytest.raises(ValueError, match="a group cannot have -1 members"):
        await group.heal(-1)
    services = await rt.group(3, Plain)
    await services.remove(services[1])
    assert len(set(await services.all(Plain.pid))) == 2


async def test_a_member_that_leaves_finishes_the_calls_that_it_has(rt: aiodaft.Runtime) -> None:
    group, other = await rt.group(2, Peer), await rt.group(1, Peer)
    leaver = group[1]
    # One runs there, and one waits for its argument.
    running, waiting = group.all(Peer.held), group.all(Peer.load, other[0].held())
    shrinking = asyncio.get_running_loop().create_task(group.resize(1))
    while len(group) == 2:
        await asyncio.sleep(0)
    assert leaver not in list(group)
    await asyncio.gather(group[0].open(), leaver.open(), other[0].open())
    assert await running == [0, 1]
    assert await waiting == [0, 1]
    await shrinking
    with pytest.raises(ActorDied, match="stopped by its owner"):
        await leaver.pid()


async def test_a_group_has_as_many_members_as_a_function_of_their_loads_says(rt: aiodaft.Runtime) -> None:
    group = await rt.group(1, Peer)
    seen: asyncio.Queue[list[int]] = asyncio.Queue()

    def half(loads: Sequence[Load]) -> float:
        assert [load.rank for load in loads] == list(range(len(group)))
        seen.put_nowait([load.in_flight for load in loads])
        return sum(load.in_flight for load in loads) / 2

    async def until(loads: list[int]) -> None:
        while await seen.get() != loads:
            pass

    scaling = asyncio.get_running_loop().create_task(group.scale(1, 3, half, every=0.001))
    await until([0])
    held = [group.any(Peer.held) for _ in range(9)]
    await until([9, 0, 0])
    more = [group.any(Peer.held) for _ in range(2)]
    await until([9, 1, 1])
    leaving = group[2]
    await group[0].open()
    await asyncio.gather(*held)
    # The one that leaves ends its call first.
    while len(group) > 1:
        await asyncio.sleep(0)
    assert not any(ref.done() for ref in more)
    await leaving.open()
    assert await more[1] == 2
    for ref in (*more[:1], scaling):
        ref.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scaling
    for sizes in ((0, 2), (3, 2), (1, "2")):
        with pytest.raises(ValueError, match="two sizes, 1 or more, and seconds are needed"):
            await group.scale(*sizes, half)  # type: ignore[arg-type]  # one is no number
    for found in (None, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"scale: .* gave {found}, which is no number of members"):
            await group.scale(1, 2, lambda loads, found=found: found)  # type: ignore[misc]  # one is no number
    with pytest.raises(TypeError, match="only the group that `rt.group` gave can be changed"):
        await group[:1].scale(1, 2, half)


async def test_a_member_that_leaves_waits_until_what_it_has_made_is_taken(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Peer, bytes(MIB))
    leaver, refs = group[1], group.all(Peer.get)
    await asyncio.gather(*(ref.ready() for ref in refs))
    shrinking = asyncio.get_running_loop().create_task(group.resize(1))
    while len(group) == 2:
        await asyncio.sleep(0)
    for _ in range(50):
        await leaver.pid()
    assert [len(state) for state in await refs] == [MIB, MIB]
    del refs
    await shrinking


async def test_a_member_waits_for_the_next_change_of_its_group(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Peer)
    # Some members are told twice before they look.
    watching = [member.watch(4) for member in group]
    await asyncio.gather(*(member.watching() for member in group))
    for size in (4, 3, 2):
        await group.resize(size)
    for rank, seen in enumerate(await asyncio.gather(*watching[:2])):
        assert seen[-1] == (4, rank, 2)
        assert seen == sorted(set(seen))
    # The one that leaves is told, and its call ends by itself.
    with pytest.raises(RuntimeError, match=r"this member has left Peer-group-\d+@.*, and is about to be stopped"):
        await watching[2]


async def test_a_group_that_is_resized_under_load_loses_no_call_and_makes_none_twice(
    rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    group = await rt.group(2, Laborer, str(tmp_path / "notes"))
    made: Counter[str] = Counter()
    over = asyncio.Event()

    async def one_by_one(name: str) -> None:
        for index in itertools.count():
            item = f"{name}-{index}"
            made[item] += 1
            assert (await group.any(Laborer.work, item))[0] == item
            if over.is_set():
                return

    async def mapped(name: str, *, ordered: bool) -> None:
        items = itertools.takewhile(lambda _: not over.is_set(), (f"{name}-{index}" for index in itertools.count()))
        results = [result async for result in group.map(Laborer.toil, noted(items), 100_000, ordered=ordered)]
        found = [result.decode().rstrip() for result in results]
        expected = [f"{name}-{index}" for index in range(len(found))]
        assert (found if ordered else sorted(found)) == (expected if ordered else sorted(expected))

    def noted(items: Iterable[str]) -> Iterator[str]:
        for item in items:
            made[item] += 1
            yield item

    async def everywhere(name: str) -> None:
        for index in itertools.count():
            count = len(group)
            made[f"all-{name}-{index}"] += count
            made.update(mine := [f"each-{name}-{index}-{rank}" for rank in range(count)])
            to_all, to_each = group.all(Laborer.work, f"all-{name}-{index}"), group.each(Laborer.toil, mine)
            assert len(await to_all) == count
            assert [result.decode() for result in await to_each] == mine
            if over.is_set():
                return

    async with asyncio.TaskGroup() as load:
        for name in ("a", "b"):
            load.create_task(one_by_one(f"any-{name}"))
            load.create_task(everywhere(name))
        load.create_task(mapped("map", ordered=True))
        load.create_task(mapped("unordered", ordered=False))
        for size in (4, 1, 3, 2, 5, 1):
            await group.resize(size)
        await group.resize(3)
        await group.remove(group[0])
        over.set()
    assert Counter((tmp_path / "notes").read_text().split()) == made
    assert made.total() > 50


class Big(aiodaft.Actor):
    """Its class is large, and is sent by value."""

    __module__ = "__main__"
    weight = os.urandom(1 << 14)

    @aiodaft.method
    async def seen(self) -> tuple[int, int, bool]:
        group = aiodaft.current_group()
        return group.rank, group.epoch, len(set(group.members)) == group.size

    @aiodaft.method
    async def lose(self) -> None:
        miss_the_members()


async def test_members_are_told_what_has_changed_and_the_class_once() -> None:
    n, size = 12, len(Big.weight)
    async with in_process(uvloop=True) as rt, rt.on(restart=Restart()).group(n, Big) as group:
        # With each actor, and with the list of its members.
        made = rt.traffic()
        assert made.control_sent + made.payload_sent < 3 * n * size
        await group.renew()
        renewed = rt.traffic()
        assert renewed.messages_sent == made.messages_sent + n
        assert renewed.control_sent - made.control_sent < 100 * n
        assert await group.all(Big.seen) == [(rank, 2, True) for rank in range(n)]
        # The restart of a member: the others are told a number.
        begun = rt.traffic().control_sent
        await Faults().kill(group[0])
        assert await group[0].seen() == (0, 3, True)
        assert await group.all(Big.seen) == [(rank, 3, True) for rank in range(n)]
        assert rt.traffic().control_sent - begun < 3 * size + 300 * n


class Keeper(aiodaft.Actor):
    """Has a copy of a group."""

    @aiodaft.method
    async def keep(self, group: Group[Big]) -> None:
        self.group = group

    @aiodaft.method
    async def once_at(self, epoch: int) -> list[tuple[int, int, bool]]:
        while self.group.epoch < epoch:
            await asyncio.sleep(0)
        return list(await self.group.all(Big.seen))


async def test_a_copy_of_a_group_is_told_of_a_new_epoch_without_the_members() -> None:
    async with in_process(uvloop=True) as rt, rt.spawn(Keeper) as keeper, rt.group(3, Big) as group:
        await keeper.keep(group)
        begun = rt.traffic().control_sent
        await group.renew()
        assert await keeper.once_at(2) == [(rank, 2, True) for rank in range(3)]
        assert rt.traffic().control_sent - begun < len(Big.weight)
        # New members travel.
        await group.resize(4)
        assert await keeper.once_at(3) == [(rank, 3, True) for rank in range(4)]


async def test_a_member_that_lacks_the_members_is_told_of_all() -> None:
    async with in_process(uvloop=True) as rt, rt.group(3, Big) as group:
        await group[1].lose()
        await group.renew()
        assert await group.all(Big.seen) == [(rank, 2, True) for rank in range(3)]
