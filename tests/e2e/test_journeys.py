"""The ten journeys of a user, from the first actor to the notebook: the promises of each, with real tensors.

Journeys that do not depend on how a runtime opens or closes share one, because every runtime imports torch anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import journeys
import pytest
import pytest_asyncio
import torch
from actors import Echo
from inside import awaited, controller_of, resources_of
from journeys import Consumer, Model, Producer, Reward, Sampler, Trainer
from leaks import is_alive
from torch import Tensor

import aiodaft
from aiodaft import Actor, Channel, Group, Ref, method
from aiodaft.typing import lazy

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A journey with a runtime of its own has a loop of its own as well, and must leave nothing at all.
own_loop = pytest.mark.asyncio(loop_scope="function")

SIZE = 1 << 18  # elements; 1 MiB of float32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_runtime() -> AsyncIterator[aiodaft.Runtime]:
    async with aiodaft.Runtime(gpus=8) as runtime:
        await runtime.stop(await runtime.spawn(Reward))
        yield runtime


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.fixture(autouse=True)
def nothing_ran_on_the_controller() -> Iterator[None]:
    """Fails a journey that made or called an actor's instance in this process."""
    yield
    assert journeys.RAN == []


async def run_in_a_task(work: Coroutine[Any, Any, Any]) -> Any:
    """As a notebook runs a cell: in a task that ends with it."""
    return await asyncio.get_running_loop().create_task(work)


@own_loop
async def test_journey_1_hello_actor() -> None:
    class Greeter(Actor):
        def __init__(self, greeting: str) -> None:
            self.greeting = greeting

        @method
        async def greet(self, name: str) -> tuple[str, int]:
            return f"{self.greeting}, {name}", os.getpid()

    async with aiodaft.Runtime(gpus=8, preload=()) as rt:
        greeter = await rt.spawn(Greeter, "hello")
        text, pid = await greeter.greet("world")
        assert text == "hello, world"
        assert pid == (await rt.info(greeter)).pid != os.getpid()
        assert "Greeter-1" in repr(greeter)
    assert not is_alive(pid)


@own_loop
async def test_journey_2_a_tensor_goes_from_model_to_model() -> None:
    async with aiodaft.Runtime(gpus=8) as rt, rt.spawn(Model, 2.0) as a, rt.spawn(Model, gain=3.0) as b:
        inp = torch.arange(SIZE, dtype=torch.float32)
        received = rt.traffic().payloads_received
        x = a.execute(inp)
        y = b.execute(x, scale=10)
        await y.ready()
        assert rt.traffic().payloads_received == received
        assert torch.equal(await y, inp * 60)
        assert rt.traffic().payloads_received > received
        assert torch.equal(await b.execute(x=lazy(x)), inp * 6)
        assert torch.equal(await x, inp * 2)
        assert torch.equal(inp, torch.arange(SIZE, dtype=torch.float32))
        assert (await a.ran(), await b.ran()) == (["Model", "execute"], ["Model", "execute", "execute"])
        assert {(await rt.info(a)).gpus, (await rt.info(b)).gpus} == {(0,), (1,)}


async def test_journey_3_worker_group(rt: aiodaft.Runtime) -> None:
    workers = await rt.on(gpus=1).group(4, Trainer, lr=0.5)
    assert len(workers) == 4
    assert await workers.all(Trainer.load, 1.0) == [None] * 4
    assert await workers.each(Trainer.step, [[1], [2], [3], [4]]) == [1.5, 2.0, 2.5, 3.0]
    assert torch.equal(await workers[0].weights(), torch.tensor([1.5]))
    assert {(await rt.info(worker)).gpus for worker in workers} == {(0,), (1,), (2,), (3,)}
    with pytest.raises(ValueError, match="3 items for 4 members"):
        workers.each(Trainer.step, [[1], [2], [3]])


async def test_journey_3_map_is_dynamic_bounded_and_in_item_order(rt: aiodaft.Runtime) -> None:
    workers = await rt.on(gpus=1).group(4, Trainer, lr=0.5)
    taken: list[int] = []

    def batches() -> Iterator[list[int]]:
        for index in range(600):
            taken.append(index)
            yield [index]

    squares = []
    async for result in workers.map(Trainer.square, batches()):
        squares += result
        # Two calls are under way on each member, and 64 results per member wait to be taken.
        assert len(taken) - len(squares) <= (2 + 64) * len(workers)
    assert squares == [index * index for index in range(600)]
    assert len([loss async for loss in workers.map(Trainer.step, [[index] for index in range(9)])]) == 9
    assert torch.cat(await workers.all(Trainer.weights)).sum().item() == 0.5 * sum(range(9))


async def test_journey_4_a_compiled_pipeline_gives_the_interpreted_results(rt: aiodaft.Runtime) -> None:
    captured: list[Any] = []
    async with rt.spawn(Model, 2.0) as a, rt.spawn(Model, 3.0) as b:

        def pipeline(x: Ref[Tensor]) -> Ref[Tensor]:
            captured.append(x)
            return b.execute(a.execute(x))

        interpreted = [await b.execute(a.execute(torch.full((SIZE,), float(i)))) for i in range(3)]
        async with aiodaft.compile(pipeline) as fast:
            one_by_one = [await fast(torch.full((SIZE,), float(i))) for i in range(3)]
            overlapping = await asyncio.gather(*(fast(torch.full((SIZE,), float(i))) for i in range(3)))
    for index in range(3):
        assert torch.equal(interpreted[index], torch.full((SIZE,), 6.0 * index))
        assert torch.equal(interpreted[index], one_by_one[index])
        assert torch.equal(interpreted[index], overlapping[index])
    assert len(captured) == 1
    with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="the graph is closed"):
        fast(torch.zeros(1))


async def train_off_policy(
    samplers: Group[Sampler], trainers: Group[Trainer], reward: Reward, prompts: list[str], steps: int
) -> tuple[list[list[float]], list[list[Tensor]]]:
    """One step off-policy: the next samples are on their way while the trainers work."""
    losses: list[list[float]] = []
    seen: list[list[Tensor]] = []
    samples = samplers.each(Sampler.generate, prompts)
    for _ in range(steps):
        scores = reward.score(samples.gather())
        trained = trainers.all(Trainer.step, scores)
        upcoming = samplers.each(Sampler.generate, prompts)
        losses.append(await trained)
        await samplers.all(Sampler.update, trainers[0].weights())
        seen.append(await samples)
        samples = upcoming
    seen.append(await samples)
    return losses, seen


async def test_journey_5_reinforcement_learning_one_step_off_policy(rt: aiodaft.Runtime) -> None:
    samplers, trainers = await rt.group(2, Sampler), await rt.group(2, Trainer, 0.5)
    reward = await rt.spawn(Reward)
    losses, samples = await train_off_policy(samplers, trainers, reward, ["a b", "c d e"], 2)
    assert losses == [[4.0, 4.0], [8.0, 8.0]]
    # The first two rounds were generated before the first update, the third one with its weights.
    weights = [0.0, 0.0, 4.0]
    for batch, weight in zip(samples, weights, strict=True):
        assert torch.equal(torch.stack(batch), torch.tensor([[3.0, weight], [5.0, weight]]))


async def test_journey_5_batches_go_around_the_controller(rt: aiodaft.Runtime) -> None:
    trainers, a, b = await rt.group(2, Trainer, 0.5), await rt.spawn(Model, 2.0), await rt.spawn(Model, 3.0)
    before = rt.traffic().control
    received = rt.traffic().payloads_received
    seed = rt.put(torch.ones(SIZE))
    results = aiodaft.Refs([b.execute(a.execute(seed)) for _ in trainers])
    await asyncio.gather(*(result.ready() for result in results))
    assert rt.traffic().payloads_received == received
    assert rt.traffic().control - before < 8192
    for result in await results:
        assert torch.equal(result, torch.full((SIZE,), 6.0))


def make_fragile() -> type[Any]:
    class Fragile(Actor, gpus=1):
        @method
        def boom(self) -> None:
            raise MemoryError("out of memory on cuda:0")

    return Fragile


@own_loop
async def test_journey_6_an_error_that_no_code_will_see_ends_a_scope_at_once() -> None:
    async with aiodaft.Runtime(gpus=8, preload=()) as rt:
        with pytest.raises(ExceptionGroup) as caught:
            async with rt.scope() as scope:
                fragile = await scope.spawn(make_fragile())
                pid = (await scope.info(fragile)).pid
                fragile.boom()
                await asyncio.Event().wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, MemoryError)
    assert str(error) == "out of memory on cuda:0"
    notes = "\n".join(error.__notes__)
    for part in ("Fragile.boom", "Fragile-1", f"pid {pid}", controller_of(rt).options.process.node):
        assert part in notes
    assert not is_alive(pid)


@own_loop
async def test_journey_6_a_held_error_waits_for_its_awaiter_or_for_the_end_of_the_block() -> None:
    reached: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(gpus=8, preload=()) as rt:
            fragile = await rt.spawn(make_fragile())
            awaited, forgotten = fragile.boom(), fragile.boom()
            await forgotten.ready()
            with pytest.raises(MemoryError, match="out of memory on cuda:0"):
                await awaited
            reached.append("the block goes on")
    assert [type(error) for error in caught.value.exceptions] == [MemoryError]
    assert reached == ["the block goes on"]
    assert forgotten.done()


async def test_journey_6_a_stopped_actor_refuses_calls(rt: aiodaft.Runtime) -> None:
    async with rt.spawn(Model, 2.0) as model:
        pid = (await rt.info(model)).pid
    assert not is_alive(pid)
    with pytest.raises(aiodaft.ActorDied, match="was stopped") as caught:
        async with asyncio.timeout(30):
            await model.execute(torch.ones(1))
    assert caught.value.executed is False


async def test_journey_7_message_passing(rt: aiodaft.Runtime) -> None:
    producer, consumer = await rt.spawn(Producer), await rt.spawn(Consumer)
    channel: Channel[Tensor] = Channel(capacity=2)
    received = rt.traffic().payloads_received
    total = consumer.run(channel)
    await producer.run(channel, 5, SIZE)
    assert await total == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rt.traffic().payloads_received == received
    with pytest.raises(aiodaft.ChannelClosed):
        await channel.recv()


async def test_journey_8_elastic_group(rt: aiodaft.Runtime) -> None:
    _, before = await resources_of(rt)
    async with rt.group(2, Trainer, lr=1.0) as group:
        assert await group.all(Trainer.step, [1]) == [1.0, 1.0]
        await group.resize(5)
        assert len(group) == 5
        assert await group.all(Trainer.step, [1]) == [2.0, 2.0, 1.0, 1.0, 1.0]
        pids = [(await rt.info(member)).pid for member in group]
        await group.resize(1)
        assert len(group) == 1
        assert [is_alive(pid) for pid in pids] == [True, False, False, False, False]
        assert await group.all(Trainer.step, [1]) == [3.0]
        with pytest.raises(aiodaft.exceptions.InsufficientResources):
            await group.resize(9)
        assert await group.all(Trainer.step, [1]) == [4.0]
    assert (await resources_of(rt))[1] == before


async def test_journey_9_streaming(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Sampler)
    assert [token async for token in group.any(Sampler.tokens, "to be or not")] == ["to", "be", "or", "not"]
    values = await asyncio.gather(group[0].generate("y"), group[1].generate("zz"))
    assert torch.equal(torch.stack(values), torch.tensor([[1.0, 0.0], [2.0, 0.0]]))


async def test_journey_9_refs_come_in_completion_order(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Sampler)
    refs = group.all(Sampler.generate_after_gate, "x")
    order = [2, 0, 1]
    expected = iter(order)
    await group[order[0]].open_gate()
    completed = []
    async for ref in refs:
        rank = next(expected)
        assert ref is refs[rank]
        assert await ref == "x"
        completed.append(rank)
        if len(completed) < 3:
            await group[order[len(completed)]].open_gate()
    assert completed == order


@own_loop
async def test_journey_10_notebook_cells_share_a_runtime_across_tasks() -> None:
    first = await run_in_a_task(aiodaft.start(gpus=8, preload=()))
    old = await run_in_a_task(awaited(first.spawn(Echo)))
    old_pid = (await first.info(old)).pid
    assert await run_in_a_task(aiodaft.start(gpus=8, preload=())) is first
    assert is_alive(old_pid)
    await run_in_a_task(aiodaft.stop())
    second = await run_in_a_task(aiodaft.start(gpus=8, preload=()))
    assert not is_alive(old_pid)
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        await run_in_a_task(awaited(first.spawn(Echo)))

    async def spawn() -> Any:
        return await second.spawn(Echo)

    async def call(echo: Echo) -> str:
        return await echo.echo("next cell")

    echo = await run_in_a_task(spawn())
    assert await run_in_a_task(call(echo)) == "next cell"
    assert "Echo-1" in repr(echo)
    pid = (await second.info(echo)).pid
    await run_in_a_task(aiodaft.stop())
    assert not is_alive(pid)
    await aiodaft.stop()
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        await call(echo)
