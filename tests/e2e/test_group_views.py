"""Views of groups: members that are called as one along axes, batches that are split, policies."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
from actors import Echo
from seated import PlainStage, Stage, Viewer

import aiodaft
from aiodaft import Group
from aiodaft.policies import Load

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest_asyncio.fixture(loop_scope="module")
async def grid(rt: aiodaft.Runtime) -> Group[Stage]:
    return await rt.group(4, Stage, axes={"dp": 2, "tp": 2})


async def news(group: Group[Stage]) -> list[list[object]]:
    """The news of each member since the last time."""
    return await group.all(Stage.news)


async def test_an_item_goes_to_all_ranks_at_its_place_and_one_of_them_gives_the_result(grid: Group[Stage]) -> None:
    replicas = grid.along("dp")
    assert (len(replicas), dict(replicas.axes)) == (2, {"dp": 2})
    assert await replicas.each(Stage.take, ["a", "b"]) == [(0, "a"), (2, "b")]
    assert await news(grid) == [["a"], ["a"], ["b"], ["b"]]
    assert await grid.along("tp").each(Stage.take, ["a", "b"], more=1) == [(0, "a"), (1, "b")]
    assert await news(grid) == [["a"], ["b"], ["a"], ["b"]]
    assert await replicas.all(Stage.take, "c") == [(0, "c"), (2, "c")]
    assert await news(grid) == [["c"]] * 4
    assert await grid.along("tp", "dp").each(Stage.take, range(4)) == [(rank, rank) for rank in range(4)]
    with pytest.raises(ValueError, match=r"Stage.take: 4 items for 2 members"):
        replicas.each(Stage.take, range(4))
    assert list(replicas) == [grid[0], grid[2]] == [replicas[0], replicas[1]]
    assert repr(replicas) == "<Group of 4 Stage along dp>"


async def test_the_place_of_the_result_can_be_chosen(grid: Group[Stage]) -> None:
    assert await grid.along("dp", result={"tp": -1}).each(Stage.take, ["a", "b"]) == [(1, "a"), (3, "b")]
    with pytest.raises(ValueError, match="'dp' is not one of the other axes, tp=2"):
        grid.along("dp", result={"dp": 0})
    with pytest.raises(ValueError, match="the axis has the places 0 to 1"):
        grid.along("dp", result={"tp": 2})
    with pytest.raises(ValueError, match="the group has no axis 'pp'"):
        grid.along("pp")
    with pytest.raises(TypeError, match="name all axes in one call of `along`"):
        grid.along("dp").along("tp")
    with pytest.raises(TypeError, match="a view along dp has no slices"):
        grid.along("dp")[:1]


async def test_a_batch_is_split_evenly_among_members_or_replicas(grid: Group[Stage]) -> None:
    assert await grid.split(Stage.take, list(range(6))) == [(0, [0, 1]), (1, [2, 3]), (2, [4]), (3, [5])]
    assert await grid.split(Stage.take, "ab") == [(0, "a"), (1, "b"), (2, ""), (3, "")]
    await news(grid)
    assert await grid.along("dp").split(Stage.take, (1, 2, 3)) == [(0, (1, 2)), (2, (3,))]
    assert await news(grid) == [[(1, 2)], [(1, 2)], [(3,)], [(3,)]]
    for batch, kind in (({1: 2}, "dict"), (iter("abc"), "str_ascii_iterator|str_iterator")):
        with pytest.raises(TypeError, match=rf"Stage.take: ({kind}) cannot be split into slices; use `each`"):
            grid.split(Stage.take, batch)


async def test_any_and_map_take_whole_replicas(grid: Group[Stage]) -> None:
    replicas = grid.along("dp")
    assert {(await replicas.any(Stage.take, "x"))[0] for _ in range(4)} == {0, 2}
    assert await news(grid) == [["x"] * 2] * 4
    results = [result async for result in replicas.map(Stage.take, range(6))]
    assert [value for _, value in results] == list(range(6))
    assert {rank for rank, _ in results} <= {0, 2}
    got = await news(grid)
    assert (got[0], got[2]) == (got[1], got[3])
    assert sorted([*got[0], *got[2]], key=str) == list(range(6))
    with pytest.raises(TypeError, match=r"Stage.words is a stream, which only one member can give"):
        replicas.any(Stage.words, "to be")


async def test_an_error_of_a_member_whose_result_does_not_count_is_raised(grid: Group[Stage]) -> None:
    replicas = grid.along("dp")
    with pytest.raises(ValueError, match="1 failed"):
        await replicas.all(Stage.fail_at, (1,))
    with pytest.raises(ExceptionGroup, match="3 members failed"):
        await replicas.all(Stage.fail_at, (0, 1, 3))
    assert await replicas.all(Stage.fail_at, (7,)) == [0, 2]


async def test_a_failed_replica_is_cancelled_as_a_whole_and_fails_once(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Stage, axes={"tp": 2, "dp": 1})
    with pytest.raises(ValueError, match="0 failed"):
        await group.along("dp").any(Stage.fail_or_wait, 0)
    while await group[1].news() != ["cancelled"]:
        pass
    with pytest.raises(ValueError, match="0 failed"):
        # The error of the other one is the same, and goes to no scope.
        await group.along("dp").any(Stage.fail_at, (0, 1))


async def test_an_error_besides_the_result_of_any_goes_to_the_scope(rt: aiodaft.Runtime) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with rt.scope() as scope:
            group = await scope.group(2, Stage, axes={"tp": 2, "dp": 1})
            ref = group.along("dp").any(Stage.fail_at, (1,))
            assert await ref == 0
            del ref
            await asyncio.Event().wait()
    assert [str(error) for error in caught.value.exceptions] == ["1 failed"]


async def test_cancelling_the_results_of_a_view_cancels_every_member(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Stage, axes={"dp": 1, "tp": 2})
    refs = group.along("dp").all(Stage.fail_or_wait, 7)
    refs.cancel()
    with pytest.raises(BaseExceptionGroup, match="2 members failed"):
        await refs
    waiting = asyncio.get_running_loop().create_task(_collect(group.along("dp").all(Stage.held, "x")))
    got: list[list[object]] = [[], []]
    while not all("x" in one for one in got):
        got = [[*one, *more] for one, more in zip(got, await news(group), strict=True)]
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def _collect(refs: aiodaft.Refs[int]) -> list[int]:
    return await refs


async def test_results_that_do_not_count_stay_where_they_are(rt: aiodaft.Runtime, grid: Group[Stage]) -> None:
    before = rt.traffic()
    assert [part[:1] for part in await grid.along("dp").all(Stage.large, MIB)] == [b"\0", b"\2"]
    moved = rt.traffic()
    assert moved.payload_received - before.payload_received == 2 * MIB


async def test_results_of_a_view_are_arguments_of_another_group(rt: aiodaft.Runtime, grid: Group[Stage]) -> None:
    echoes = await rt.group(2, Echo)
    assert await echoes.each(Echo.echo, grid.along("dp").all(Stage.take, "y")) == [(0, "y"), (2, "y")]
    assert await grid.along("dp").each(Stage.take, echoes.all(Echo.echo, "z")) == [(0, "z"), (2, "z")]


async def test_a_view_follows_the_changes_of_its_group(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Stage, axes={"dp": 1, "tp": 2})
    replicas, chosen = group.along("dp"), group.with_policy(lambda loads: loads[-1].rank)
    assert (len(replicas), len(chosen)) == (1, 2)
    await group.resize(6)
    assert await replicas.each(Stage.take, "abc") == [(0, "a"), (2, "b"), (4, "c")]
    assert (len(chosen), chosen.epoch) == (6, 2)


async def test_a_view_travels(rt: aiodaft.Runtime, grid: Group[Stage]) -> None:
    viewer = await rt.spawn(Viewer)
    assert await viewer.each(grid.along("dp", result={"tp": 1}), [1, 2]) == [(1, 1), (3, 2)]


async def test_a_policy_sees_the_loads_and_chooses(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Stage)
    seen: list[list[Load]] = []

    def busiest(loads: list[Load]) -> int:
        seen.append(sorted(loads))
        return max(range(len(loads)), key=lambda index: loads[index].in_flight)

    view = group.with_policy(busiest)
    first = group.any(Stage.held, "a")
    second, third = view.any(Stage.held, "b"), view.any(Stage.held, "c")
    # The calls of the group and of its views are counted together.
    assert [sorted(load.in_flight for load in loads) for loads in seen] == [[0, 0, 1], [0, 0, 2]]
    assert {load.distance for load in seen[0]} == {1}
    await group.all(Stage.open)
    assert len(set(await asyncio.gather(first, second, third))) == 1


async def test_views_of_hosted_classes(rt: aiodaft.Runtime) -> None:
    services = await rt.group(4, PlainStage, axes={"dp": 2, "tp": 2})
    assert await services.along("dp").split(PlainStage.take, [1, 2, 3]) == [3, 3]
    assert await services.all(PlainStage.news) == [[[1, 2]], [[1, 2]], [[3]], [[3]]]
