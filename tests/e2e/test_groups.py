"""Groups: like actors called together, and their results (sections 2 and 9)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from actors import Box, Echo, NeedsGpu, Plain
from inside import actors_of, agent_of, resources_of
from leaks import is_alive
from probes import FirstIsQuick, Member
from supervised import AT_ONCE

import aiodaft
from aiodaft.testing import in_process

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def begun(member: Member, count: int) -> list[str]:
    """The events that a member has begun, once there are `count`."""
    while len(history := [event for event in await member.history() if event.endswith("began")]) < count:
        await asyncio.sleep(0)
    return history


async def test_all_calls_every_member_with_the_same(rt: aiodaft.Runtime) -> None:
    group, echo = await rt.group(3, Member, 2), await rt.spawn(Echo)
    assert await group.all(Member.times, 5) == [10, 10, 10]
    assert await group.all(Member.times, 5, plus=1) == [11, 11, 11]
    assert await group.all(Member.times, echo.echo(7)) == [14, 14, 14]
    assert len(set(await group.all(Member.pid))) == 3


async def test_each_gives_every_member_its_own(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member, 10)
    assert await group.each(Member.times, [1, 2, 3]) == [10, 20, 30]
    assert await group.each(Member.times, iter((1, 2, 3)), plus=1) == [11, 21, 31]
    # Results of one call are the arguments of the next, member by member.
    assert await group.each(Member.times, group.each(Member.times, [1, 2, 3])) == [100, 200, 300]
    before = rt.traffic()
    with pytest.raises(ValueError, match=r"Member.times: 2 items for 3 members"):
        group.each(Member.times, [1, 2])
    with pytest.raises(TypeError, match=r"Member.times\("):
        group.all(Member.times)  # type: ignore[call-overload]  # the mistake under test
    assert rt.traffic() == before


async def test_the_constructor_of_each_member_gets_its_own_item(rt: aiodaft.Runtime) -> None:
    own = rt.on(restart=aiodaft.Restart(intensity=None, backoff=AT_ONCE))
    group = await own.group(2, Member, each=(scale for scale in (1, 2, 30)), axes={"dp": 2})
    assert await group.all(Member.times, 5) == [5, 10]
    # The next items are for members that join later; a member keeps its own when it is restarted.
    await group.resize(3)
    os.kill(await group[1].pid(), signal.SIGKILL)
    while (await rt.info(group[1])).epoch == 0:
        pass
    assert await group.all(Member.times, 5) == [5, 10, 150]
    with pytest.raises(ValueError, match="each has 3 items: too few for a group of 4 members"):
        await group.resize(4)
    assert await group.all(Member.times, 1) == [1, 2, 30]
    services = await rt.group(2, Plain, each=[10, 20])
    assert await services.all(Plain.add, 1) == [11, 21]
    wrong: Any
    for wrong, kind, text in (
        ([1], ValueError, "each has 1 items: too few for a group of 2 members"),
        (5, TypeError, "each=5: items are needed, one for each member"),
        ("ab", TypeError, "each='ab': items are needed"),
    ):
        with pytest.raises(kind, match=text):
            rt.group(2, Member, each=wrong)
    with pytest.raises(TypeError, match="too many positional arguments"):
        rt.group(2, Member, 7, each=[1, 2])


async def test_any_takes_the_member_with_the_fewest_calls(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member)
    refs = [group.any(Member.held, index) for index in range(6)]
    assert [len(await begun(member, 2)) for member in group] == [2, 2, 2]
    await group[1].open()
    mine = [refs[int(event.split()[0])] for event in await begun(group[1], 2)]
    await asyncio.gather(*mine)
    # Only member 1 has nothing to do now.
    assert await group.any(Member.pid) == await group[1].pid()
    await group.all(Member.open)
    assert await asyncio.gather(*refs) == list(range(6))


async def test_any_gives_streams_too(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    assert [word async for word in group.any(Member.words, "to be or not")] == ["to", "be", "or", "not"]
    with pytest.raises(TypeError, match=r"Member.words is a stream: use `group.any`"):
        group.all(Member.words, "x")  # type: ignore[call-overload]  # the mistake under test
    with pytest.raises(TypeError, match="is not a remote method of Member"):
        group.all(Member.undecorated)  # type: ignore[call-overload]  # the mistake under test
    with pytest.raises(TypeError, match="is not a remote method of Member"):
        group.all(Echo.echo, 1)


async def test_map_gives_results_in_item_order_and_takes_items_as_needed(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member, 3)
    assert [value async for value in group.map(Member.times, range(20), plus=1)] == [3 * i + 1 for i in range(20)]
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    results = group.map(Member.times, endless())
    assert [await anext(results) for _ in range(5)] == [3, 6, 9, 12, 15]
    assert taken < 1000
    await results.aclose()
    assert [value async for value in group.map(Member.times, [])] == []
    with pytest.raises(ValueError, match="has no members"):
        await anext(group[2:].map(Member.times, [1]))


async def test_members_of_a_map_do_not_wait_for_the_oldest_item(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    done: list[int] = []
    results = asyncio.get_running_loop().create_task(_collect(group.map(Member.hold_first, noted(done, range(100)))))
    # All other calls have run by now, but for the ones that may wait for their turn.
    while len(done) < 100:
        await asyncio.sleep(0)
    assert not results.done()
    await group.all(Member.open)
    assert await results == list(range(100))


async def test_an_unordered_map_gives_results_as_they_come(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    results = group.map(Member.hold_first, range(100), ordered=False)
    assert {await anext(results) for _ in range(99)} == set(range(1, 100))
    await group.all(Member.open)
    assert [value async for value in results] == [0]
    with pytest.raises(ValueError, match="is odd"):
        await _collect(group.map(Member.odd_fails, [0, 1, 2], ordered=False))


async def test_results_that_wait_for_the_oldest_are_bounded_in_number_and_size(
    rt: aiodaft.Runtime,
) -> None:
    group = await rt.group(2, Member)
    # 256 MiB at most, in results of 8 MiB.
    for method, most, count in ((Member.hold_first, 2 * 64, 200), (Member.padded, 32, 60)):
        taken: list[int] = []
        results = asyncio.get_running_loop().create_task(_collect(group.map(method, noted(taken, range(count)))))
        while len(taken) <= most:
            await asyncio.sleep(0)
        for _ in range(3):
            await group.all(Member.times, 1)
        assert most < len(taken) <= most + 2 * len(group)
        await group.all(Member.open)
        assert len(await results) == count
        await group.all(Member.close)


def noted(taken: list[int], items: Iterable[int]) -> Iterator[int]:
    """Items, and which of them were taken."""
    for item in items:
        taken.append(item)
        yield item


async def test_map_keeps_two_calls_per_member_under_way_of_a_method_without_concurrency(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    results = group.map(Member.held, range(100))
    first = asyncio.get_running_loop().create_task(_first(results))
    for member in group:
        await begun(member, 2)
    assert sum([len(await begun(member, 2)) for member in group]) == 4
    await group.all(Member.open)
    assert await first == 0
    assert [value async for value in results] == list(range(1, 100))


class Batching(aiodaft.Actor):
    """Takes several calls at a time."""

    def __init__(self) -> None:
        self.running = 0
        self.opened = asyncio.Event()

    @aiodaft.method(concurrency=4)
    async def held(self, value: int) -> int:
        self.running += 1
        await self.opened.wait()
        self.running -= 1
        return value

    @aiodaft.method(ordered=False)
    async def count(self) -> int:
        return self.running

    @aiodaft.method(ordered=False)
    async def open(self) -> None:
        self.opened.set()


async def test_a_map_keeps_as_many_calls_under_way_as_the_method_takes_and_one_more() -> None:
    taken: list[int] = []
    async with in_process(uvloop=True) as rt, rt.group(2, Batching) as group:
        mapping = asyncio.get_running_loop().create_task(_collect(group.map(Batching.held, noted(taken, range(50)))))
        while await group.all(Batching.count) != [4, 4]:
            assert not mapping.done()
        assert len(taken) == 2 * (4 + 1)
        await group.all(Batching.open)
        assert await mapping == list(range(50))


async def test_a_map_takes_asynchronous_items_and_gives_results_while_it_waits_for_more(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member, 2)
    more, closed = asyncio.Event(), asyncio.Event()

    async def items(error: type[Exception] | None = None) -> AsyncGenerator[int]:
        try:
            for value in range(3):
                yield value
            if error is not None:
                raise error
            await more.wait()
            yield 3
        finally:
            closed.set()

    results = group.map(Member.times, items())
    assert [await anext(results) for _ in range(3)] == [0, 2, 4]
    more.set()
    assert [value async for value in results] == [6]
    # Also those of another actor.
    await group.all(Member.open)
    assert [word async for word in group.map(Member.held, group[0].words("to be or not"))] == ["to", "be", "or", "not"]
    failing = group.map(Member.times, items(LookupError), ordered=False)
    assert {await anext(failing) for _ in range(3)} == {0, 2, 4}
    with pytest.raises(LookupError):
        await anext(failing)
    # The items are left with the loop.
    more.clear()
    closed.clear()
    left = group.map(Member.times, items())
    assert [await anext(left) for _ in range(3)] == [0, 2, 4]
    waiting = asyncio.get_running_loop().create_task(_first(left))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert closed.is_set()


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_map_gives_the_errors_of_calls_as_results_if_asked_to(rt: aiodaft.Runtime, ordered: bool) -> None:
    group = await rt.group(2, Member)
    items: list[Any] = [0, 1, asyncio.get_running_loop(), 3, 4]
    mapping = group.map(Member.odd_fails, items, ordered=ordered, return_exceptions=True)
    results = [value async for value in mapping]
    shown = [type(value).__name__ if isinstance(value, Exception) else value for value in results]
    expected: list[Any] = [0, "ValueError", "SerializationError", "ValueError", 4]
    assert (shown if ordered else sorted(shown, key=str)) == (expected if ordered else sorted(expected, key=str))

    def broken() -> Iterator[int]:
        yield 1
        raise LookupError

    # That of the items is raised.
    mapping = group.map(Member.odd_fails, broken(), return_exceptions=True)
    assert isinstance(await anext(mapping), ValueError)
    with pytest.raises(LookupError):
        await anext(mapping)


async def test_leaving_a_map_cancels_what_is_under_way(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    mapping = asyncio.get_running_loop().create_task(_collect(group.map(Member.held, range(100))))
    for member in group:
        await begun(member, 2)
    mapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await mapping
    for member in group:
        while len(history := await member.history()) < 4:
            await asyncio.sleep(0)
        assert sum(event.endswith("ended") for event in history) == 2
    assert await group.all(Member.times, 1) == [1, 1]


async def _first(items: Any) -> Any:
    return await anext(items)


async def _collect(items: Any) -> list[Any]:
    return [item async for item in items]


async def test_an_error_in_a_map_comes_at_its_place_and_the_rest_is_cancelled(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    got: list[int] = []
    with pytest.raises(ValueError, match="5 is odd"):
        async for value in group.map(Member.odd_fails, [0, 2, 4, 5, 6, 7, 8]):
            got.append(value)  # noqa: PERF401 - items before the error count
    assert got == [0, 2, 4]
    assert await group.all(Member.odd_fails, 2) == [2, 2]


async def test_refs_give_a_list_each_ref_or_one_ref(rt: aiodaft.Runtime) -> None:
    group, echo = await rt.group(3, Member), await rt.spawn(Echo)
    refs = group.each(Member.held, ["a", "b", "c"])
    assert len(refs) == 3
    assert repr(refs) == "<Refs: 0 of 3 done>"
    order = []
    completed = aiter(refs)
    for rank in (2, 0, 1):
        await group[rank].open()
        order.append(await anext(completed))
    assert order == [refs[2], refs[0], refs[1]]
    with pytest.raises(StopAsyncIteration):
        await anext(completed)
    assert await refs == ["a", "b", "c"] == [await ref for ref in refs]
    assert await refs[-1] == "c"
    gathered = refs.gather()
    assert await gathered == ["a", "b", "c"]
    assert await echo.echo(gathered) == ["a", "b", "c"]
    assert await group[0].total(group.each(Member.times, [1, 2, 3]).gather()) == 6
    assert await echo.echo({"in": [group.all(Member.times, 2).gather()]}) == {"in": [[2, 2, 2]]}
    assert repr(refs) == "<Refs: 3 of 3 done>"


async def test_what_ends_the_items_of_a_map_comes_behind_the_results_before_it(rt: aiodaft.Runtime) -> None:
    def items(last: Any) -> Iterator[Any]:
        yield from range(5)
        yield last
        raise LookupError("no more")

    group = await rt.group(2, Member)
    for last, error, count in (
        (5, LookupError, 6),
        (asyncio.get_running_loop(), aiodaft.exceptions.SerializationError, 5),
    ):
        for ordered in (True, False):
            mapping = group.map(Member.times, items(last), ordered=ordered)
            assert sorted([await anext(mapping) for _ in range(count)]) == list(range(count))
            with pytest.raises(error):
                await anext(mapping)


async def test_refs_feed_a_map_and_travel_as_refs(rt: aiodaft.Runtime) -> None:
    group, echo = await rt.group(2, Member, 2), await rt.spawn(Echo)
    refs = group.each(Member.times, [1, 2])
    assert [value async for value in group.map(Member.times, refs)] == [4, 8]
    travelled: Any = await echo.echo(refs)
    assert await travelled == [2, 4]


async def test_cancelling_refs_cancels_every_member(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member)
    refs = group.all(Member.held, "x")
    for member in group:
        await begun(member, 1)
    refs.cancel()
    with pytest.raises(BaseExceptionGroup) as caught:
        await refs
    assert caught.group_contains(aiodaft.CallCancelled)
    assert len(caught.value.exceptions) == 3
    # With 0, before the tasks that wait for the members have taken their first step.
    for count, (name, seconds) in enumerate([("y", 0.1), ("z", 0)], 2):
        refs = group.all(Member.held, name)
        for member in group:
            await begun(member, count)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await refs
        for member in group:
            assert (await member.history())[-1] == f"{name} ended"


async def test_an_error_of_one_member_comes_when_all_are_over(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member)
    with pytest.raises(ValueError, match="1 is odd"):
        await group.each(Member.odd_fails, [0, 1, 2])
    with pytest.raises(ExceptionGroup, match="2 members failed") as caught:
        await group.each(Member.odd_fails, [1, 2, 3])
    assert [str(error) for error in caught.value.exceptions] == ["1 is odd", "3 is odd"]
    refs = group.each(Member.odd_fails, [1, 2, 4])
    with pytest.raises(ValueError, match="1 is odd"):
        await refs.gather()
    assert await refs[1] == 2


async def test_members_by_index_slice_and_iteration(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Member)
    assert repr(group) == "<Group of 4 Member>"
    assert len(group) == 4
    assert list(group) == [group[rank] for rank in range(4)]
    assert group[-1] == group[3]
    with pytest.raises(IndexError):
        group[4]
    front, odd = group[:2], group[1::2]
    assert (list(front), list(odd)) == (list(group)[:2], list(group)[1::2])
    assert await odd.each(Member.times, [1, 2]) == [1, 2]
    assert await group[2:2].all(Member.times, 1) == []
    with pytest.raises(ValueError, match="has no members"):
        group[2:2].any(Member.times, 1)
    with pytest.raises(TypeError, match="only the group that `rt.group` gave"):
        await front.resize(3)
    assert [(await rt.info(member)).name.partition("[")[2] for member in group] == ["0]", "1]", "2]", "3]"]


async def test_a_group_travels_to_an_actor(rt: aiodaft.Runtime) -> None:
    group, echo = await rt.group(2, Member, 5), await rt.spawn(Echo)
    same = await echo.echo(Box(group))
    assert list(same.ref) == list(group)
    assert await same.ref.all(Member.times, 1) == [5, 5]
    with pytest.raises(TypeError, match="only the group that `rt.group` gave"):
        await same.ref.resize(1)


async def test_resize_keeps_members_and_their_calls(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member, 7)
    pids = await group.all(Member.pid)
    refs = group.all(Member.held, "before")
    await begun(group[1], 1)
    await group.resize(4)
    assert (await group.all(Member.pid))[:2] == pids
    assert await group.all(Member.times, 1) == [7] * 4
    assert not refs[0].done()
    names = [(await rt.info(member)).name for member in group]
    assert len(set(names)) == 4
    assert [name.partition("[")[2] for name in names] == ["0]", "1]", "2]", "3]"]
    await group.all(Member.open)
    assert await refs == ["before"] * 2
    await group.resize(4)
    assert len(group) == 4
    with pytest.raises(ValueError, match="cannot have -1 members"):
        await group.resize(-1)


async def test_shrinking_lets_calls_under_way_end_and_takes_the_last_ranks(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member)
    pids, last = await group.all(Member.pid), group[2]
    refs = group.all(Member.held, "x")
    await begun(last, 1)
    opened = asyncio.gather(group[1].open(), last.open())
    await group.resize(1)
    await opened
    assert (await refs[1], await refs[2]) == ("x", "x")
    assert [is_alive(pid) for pid in pids] == [True, False, False]
    with pytest.raises(aiodaft.ActorDied, match="was stopped"):
        await last.pid()
    await group.all(Member.open)
    assert await refs[0] == "x"
    assert await group.all(Member.pid) == pids[:1]


async def test_growing_beyond_what_there_is_changes_nothing(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, NeedsGpu)
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match=r"NeedsGpu-\d+\[\d\] needs gpus=1"):
        await group.resize(5)
    assert len(group) == 2
    assert (await resources_of(rt))[1]["gpus"] == 2
    await group.resize(4)
    assert sorted(await group.all(NeedsGpu.visible)) == ["0", "1", "2", "3"]
    await group.resize(0)
    assert (await resources_of(rt))[1]["gpus"] == 4
    assert len(group) == 0


async def test_leaving_the_block_of_a_group_stops_grown_members_too(rt: aiodaft.Runtime) -> None:
    async with rt.group(1, Member) as group:
        await group.resize(3)
        pids = await group.all(Member.pid)
    assert not any(map(is_alive, pids))


async def test_a_member_that_dies_fails_its_own_calls_only(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member)
    refs = group.all(Member.held, "x")
    for member in group:
        await begun(member, 1)
    os.kill(await group[1].pid(), signal.SIGKILL)
    completed = await anext(aiter(refs))
    assert completed is refs[1]
    assert isinstance(completed.exception(), aiodaft.ActorDied)
    await asyncio.gather(group[0].open(), group[2].open())
    with pytest.raises(aiodaft.ActorDied, match=r"Member-\d+\[1\] .*SIGKILL"):
        await refs
    assert (await refs[0], await refs[2]) == ("x", "x")
    assert await group[::2].all(Member.times, 2) == [2, 2]
    with pytest.raises(aiodaft.ActorDied):
        await group.all(Member.times, 2)
    await rt.stop(group)


async def test_a_group_leaves_no_member_when_its_making_is_cancelled(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    async def make() -> None:
        await rt.group(3, FirstIsQuick, str(tmp_path))

    making = asyncio.get_running_loop().create_task(make())
    while not len(actors_of(rt)):
        await asyncio.sleep(0)
    making.cancel()
    await asyncio.wait([making])
    assert making.cancelled()
    assert await agent_of(rt).processes() == ()
    assert not len(actors_of(rt))
