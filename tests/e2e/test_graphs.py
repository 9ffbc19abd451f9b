"""Compiled graphs give the results of the same calls one by one (rows CO1 to CO4, CO7)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from graph_actors import Box, Node

import aiodaft
from aiodaft import Ref, Refs

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def spawn(rt: aiodaft.Runtime, count: int) -> list[Any]:
    return list(await asyncio.gather(*(rt.spawn(Node, f"n{index}") for index in range(count))))


def random_flow(source: random.Random, actors: list[Any]) -> Any:
    """A dataflow with several inputs and outputs, constants, containers, side effects, and both kinds of method."""
    plan = []
    inputs = source.randint(1, 3)
    for index in range(source.randint(1, 9)):
        needs = [source.randrange(inputs + index) for _ in range(source.randint(0, 2))]
        plan.append((source.choice(actors), source.choice(["on_loop", "on_thread", "one_at_a_time", "spoil"]),
                     needs, source.randint(0, 14), source.randint(0, 4)))  # fmt: skip
    # Every end too: the error of a result without a ref would end the test.
    used = {value for _, _, needs, *_ in plan for value in needs}
    outputs = [value for value in range(inputs, inputs + len(plan)) if value not in used or source.random() < 0.2]

    def flow(*refs: Any) -> list[Any]:
        values = list(refs)
        for actor, name, needs, constant, shape in plan:
            args: list[Any] = [values[index] for index in needs]
            if name == "spoil":
                args = [args or [constant]]
            elif shape == 1:
                args.append({"deep": [Box(list(args)), (constant,)]})
            elif shape == 2:
                args.append(constant)
            values.append(getattr(actor, name)(*args))
        return [values[index] for index in outputs]

    return inputs, flow


async def outcomes(refs: list[Any]) -> list[Any]:
    """Values, and of errors the type, the text and the place of the raise.

    One by one, an error that several calls fail of collects the notes of them all, depending on the order of the calls.
    """
    found = await asyncio.gather(*refs, return_exceptions=True)
    return [(type(one), str(one), one.__notes__[0]) if isinstance(one, BaseException) else one for one in found]


def with_inputs(count: int, flow: Any) -> Any:
    if count == 1:
        return lambda a: flow(a)
    return (lambda a, b: flow(a, b)) if count == 2 else lambda a, b, c: flow(a, b, c)


@pytest.mark.timeout(120)
async def test_random_dataflows_give_the_same_compiled_and_interpreted(module_rt: aiodaft.Runtime) -> None:
    """200 of them, bit for bit, with exceptions: their types, texts and notes."""
    actors = await spawn(module_rt, 3)
    actors.append(await module_rt.on(with_=actors[0]).spawn(Node, "beside"))
    source = random.Random(5)
    failed = 0
    for _ in range(200):
        inputs, flow = random_flow(source, actors)
        runs = [[source.randint(0, 14) for _ in range(inputs)] for _ in range(2)]
        graph: Any = aiodaft.compile(with_inputs(inputs, flow))
        started = [graph(*values) for values in runs]
        for values, refs in zip(runs, started, strict=True):
            wrapped = [module_rt.put(value) for value in values]
            expected = await outcomes(flow(*wrapped))
            assert await outcomes(refs) == expected
            failed += any(isinstance(one, tuple) for one in expected)
        await graph.aclose()
    assert failed > 20


async def test_a_run_is_one_message_to_each_process_and_one_back_and_no_socket(module_rt: aiodaft.Runtime) -> None:
    """128 tasks over 4 actors; interpreted they are 128 messages at least."""
    actors = await spawn(module_rt, 4)

    def flow(x: Ref[int]) -> Ref[int]:
        for index in range(127):
            x = actors[index % 4].same(x)
        return actors[3].on_loop(x)

    async with aiodaft.compile(flow) as graph:
        expected = await graph(5)
        # Work that was begun before, such as the giving back of refs, is over when every actor has answered.
        await asyncio.gather(*(actor.same() for actor in actors))
        before = module_rt.traffic()
        assert [await graph(5) for _ in range(10)] == [expected] * 10
        after = module_rt.traffic()
    assert after.messages_sent - before.messages_sent == 4 * 10
    assert after.messages_received - before.messages_received == 10
    sent, received = after.ring_sent - before.ring_sent, after.ring_received - before.ring_received
    assert min(sent, received) > 0
    assert after.control - before.control == sent + received


async def test_many_runs_are_under_way_and_the_others_wait_here(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    async with aiodaft.compile(lambda x: b.same(a.wait(x)), max_in_flight=16) as graph:
        refs = [graph(index) for index in range(40)]
        # Calls without an order go in between, and are answered after the runs that were sent before have come.
        assert await a.state() == (1, 16, 0)
        assert not any(ref.done() for ref in refs)
        refs[30].cancel()
        with pytest.raises(aiodaft.CallCancelled) as caught:
            await refs[30]
        assert caught.value.executed is False
        await a.open()
        assert await asyncio.gather(*(refs[:30] + refs[31:])) == [*range(30), *range(31, 40)]
        assert (await a.state())[1:] == (0, 0)


async def test_calls_made_one_by_one_keep_their_order_among_runs(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)

    def flow(x: Ref[Any]) -> Ref[Any]:
        a.note(x)
        return a.same(b.same(x))

    async with aiodaft.compile(flow) as first, aiodaft.compile(lambda x: a.note(b.same(x))) as second:
        for number in range(4):
            first(f"first {number}")
            a.note(f"between {number}")
            await second(f"second {number}")
        expected = [f"{kind} {number}" for number in range(4) for kind in ("first", "between", "second")]
        assert await a.notes() == expected


async def test_a_result_is_a_ref_like_any_other(module_rt: aiodaft.Runtime) -> None:
    """Awaited twice, passed on, kept while later runs go on, and of the value that it had."""
    a, b = await spawn(module_rt, 2)
    async with aiodaft.compile(lambda x: [b.same(a.same(x)), a.same(x)]) as graph:
        large = [bytes([index]) * 300_000 for index in range(20)]
        kept: list[Any] = [graph(data) for data in large]
        assert await b.same(kept[3][0]) == large[3]
        assert await b.same({"deep": [kept[4][1]]}) == {"deep": [large[4]]}
        await asyncio.gather(*(kept[index][0].ready() for index in range(20)))
        for index, (first, second) in enumerate(kept):
            assert await first == await first == large[index]
            assert await second == large[index]
        assert await graph(kept[5][0])[1] == large[5]
        assert await graph([kept[6][0], 1])[0] == [large[6], 1]


async def test_tensors_on_edges_take_their_size_from_each_run(module_rt: aiodaft.Runtime) -> None:
    """No recompiling for another shape; a branch on a value is taken between two graphs (row CO7)."""
    a, b = await spawn(module_rt, 2)
    shrink, grow = aiodaft.compile(lambda x: b.same(a.spoil(x))), aiodaft.compile(lambda x: a.same([b.same(x), x]))
    kept = []
    for size in (10, 1 << 19, 3, 1 << 20, 0, 1 << 18):
        tensor = np.arange(size)
        result = shrink(tensor)
        kept.append((tensor.copy(), result))
        if (await result).sum() > 1000:
            tensor += 1
            first, second = await grow(tensor)
            assert np.array_equal(first, tensor)
            assert np.array_equal(second, tensor)
    for tensor, result in kept:
        assert np.array_equal(await result, tensor)
    await asyncio.gather(shrink.aclose(), grow.aclose())


async def test_constants_are_new_for_each_run_and_refs_from_outside_are_constants(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    outside = a.same(["made before"])
    list_of_them = aiodaft.Refs([a.same(1), b.same(2)])
    held = Box(module_rt.put("travels as a ref"))

    def flow() -> Any:
        spoilt = a.spoil(["constant"])
        return [b.same([spoilt, outside, list_of_them.gather(), ("x", {1: spoilt})]), a.spoil(outside), b.keep(held)]

    async with aiodaft.compile(flow) as graph:
        for _ in range(3):
            mixed, again, content = [await ref for ref in graph()]
            made = ["constant", "spoilt"]
            assert mixed == [made, ["made before"], [1, 2], ("x", {1: made})]
            assert again == ["made before", "spoilt"]
            assert content == "travels as a ref"


async def test_outputs_come_in_the_container_that_was_returned(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    async with aiodaft.compile(lambda x: Refs([a.same(x), b.same(a.pid())]).gather()) as graph:
        assert await graph("x") == ["x", await a.pid()]
    several: Any = aiodaft.compile(lambda x: Refs([a.same(x), b.same("y")]))
    async with several:
        assert await several("x") == ["x", "y"]
    nested: Any = aiodaft.compile(lambda x: {"both": [a.same(x), b.same(x)], "one": (a.same("one"),)})
    async with nested:
        outputs = nested("x")
        assert [await ref for ref in outputs["both"]] == ["x", "x"]
        assert await outputs["one"][0] == "one"


async def test_groups_in_a_graph(module_rt: aiodaft.Runtime) -> None:
    group = await module_rt.group(3, Node)

    def flow(x: Ref[int], y: Ref[int]) -> Any:
        parts = group.each(Node.same, [x, y, 7])
        group.all(Node.note, x)
        return group.all(Node.same, parts.gather())

    async with aiodaft.compile(flow) as graph:
        assert await graph(1, 2) == [[1, 2, 7]] * 3  # type: ignore[comparison-overlap]  # Refs of three lists
        assert await group.all(Node.notes) == [[1]] * 3


async def test_a_worker_has_graphs_of_its_own_over_itself_too(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    assert await a.compile_with(b, 4) == [await b.on_loop(4), await b.on_loop(5)]
    beside = await module_rt.on(with_=a).spawn(Node)
    assert await a.compile_with(beside, 4) == [await b.on_loop(4), await b.on_loop(5)]


async def test_what_cannot_be_captured_is_refused_with_its_line(module_rt: aiodaft.Runtime) -> None:
    (a,) = await spawn(module_rt, 1)

    def streams(x: Ref[str]) -> Any:
        return a.words(x)

    with pytest.raises(TypeError, match=r"words: streams and tell\(\) cannot be captured.*test_graphs.py:\d+"):
        aiodaft.compile(streams)
    with pytest.raises(TypeError, match="streams and tell"):
        aiodaft.compile(lambda x: a.note.tell(x))
    with pytest.raises(TypeError, match="must return the refs of calls"):
        aiodaft.compile(lambda x: x)
    with pytest.raises(TypeError, match="did you forget `await`"):
        aiodaft.compile(lambda x: a.same(x + 1))
    with pytest.raises(aiodaft.exceptions.SerializationError) as caught:
        aiodaft.compile(lambda x: a.same([x, asyncio.get_running_loop()]))
    assert "test_graphs.py" in caught.value.__notes__[-1]
    captured: list[Ref[Any]] = []
    async with aiodaft.compile(lambda x: captured.append(a.same(x)) or captured[0]):  # type: ignore[func-returns-value]  # brief
        with pytest.raises(TypeError, match="call the graph"):
            await captured[0]
    async with aiodaft.compile(lambda x: a.same(module_rt.put([x]))) as graph:
        (inside,) = await graph(1)
        with pytest.raises(TypeError, match="call the graph"):
            await inside
    gathered: list[Ref[Any]] = []

    def gathers(x: Ref[Any]) -> Ref[Any]:
        gathered.append(aiodaft.Refs([a.same(x)]).gather())
        return a.same(gathered[0])

    async with aiodaft.compile(gathers) as graph:
        assert await graph(1) == [1]
        with pytest.raises(TypeError, match="call the graph"):
            await gathered[0]
    async with aiodaft.compile(lambda x: a.same(x)) as graph:
        with pytest.raises(TypeError, match=r"cannot run inside another \(.*test_graphs.py:\d+"):
            aiodaft.compile(lambda x: a.same(graph(x)))
        with pytest.raises(aiodaft.exceptions.SerializationError, match="stays in the process that captured it"):
            await a.same(graph)


async def test_refs_inside_results_live_until_they_are_registered(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    async with aiodaft.compile(lambda x: b.same(a.boxed(x))) as graph:
        boxes = [await graph(number) for number in range(5)]
        assert [await box.content for box in boxes] == list(range(5))
