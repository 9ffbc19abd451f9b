"""Valid programs: every line type-checks, with exactly these types, in pyright (strict) and mypy --strict, and runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, assert_type

import aiodaft
from aiodaft import Channel, Graph, Group, Ref, Refs, Restart, Runtime, Scope, Stream, method
from aiodaft.pipeline import drive, one_f_one_b
from aiodaft.queue import Batch, Consumer, TransferQueue, Wants, at_once, open_queue
from aiodaft.state import ActorInfo, NodeInfo
from aiodaft.typing import CurrentGroup, Message, Service, ServiceGroup, Spawned, lazy, local

if TYPE_CHECKING:
    import torch


class Tensor:
    """Stands for a tensor; checking torch's own stubs would take most of the time."""

    def __init__(self, v: float = 0) -> None:
        self.v = v


T = TypeVar("T")


class Box(aiodaft.Actor, Generic[T]):
    """Is spawned with and without its type argument."""

    def __init__(self, value: T) -> None:
        self.value = value

    @method
    async def get(self) -> T:
        return self.value


class Model(aiodaft.Actor, gpus=1):
    """Methods of every kind."""

    def __init__(self, name: str, gain: float = 2.0) -> None:
        self.name, self.gain = name, gain

    @method
    async def execute(self, x: Tensor, scale: float = 1.0, *, n: int = 1) -> Tensor:
        return Tensor(x.v * self.gain * scale * n)

    @method
    def sync(self, x: int) -> str:
        return str(x)

    @method
    async def two(self, x: Tensor, y: list[Tensor]) -> dict[str, float]:
        return {"x": x.v, "y": sum(item.v for item in y)}

    @method
    async def three(self, x: Tensor, i: int, s: str) -> int:
        return int(x.v) + i + len(s)

    @method
    async def neighbour(self) -> str:
        group: CurrentGroup[Model] = aiodaft.current_group().along("tp")
        assert_type(group.along("tp"), CurrentGroup[Model])
        if not group.is_current:
            assert_type(await group.changed(), CurrentGroup[Model])
        assert_type(group.members[0].sync(1), Ref[str])
        assert_type(await group.send(1, to=group.rank, tag="x"), None)
        assert_type(await group.recv_message(source=group.rank), Message)
        assert_type(await group.all_reduce(2.5, key=("loss", 1), timeout=1.0), float)
        assert_type(await group.all_reduce("a", max), str)
        assert_type(await group.gather(3, root=1), list[int] | None)
        assert_type(await group.all_to_all(["a", "b"]), list[str])
        assert_type(group.broadcast([1] if group.rank == 0 else None), Ref[list[int]])
        assert_type(group.barrier(), Ref[None])
        return await group.members[1 - group.rank].sync(1 - group.rank)

    @method
    async def report_to(self, other: Model) -> str:
        me: Model = aiodaft.current_actor()
        return await other.ask(me, 1)

    @method
    async def none(self) -> int:
        return 1

    @method
    async def tokens(self, prompt: str) -> AsyncIterator[str]:
        for word in prompt.split():
            yield word

    @method
    def letters(self, prompt: str) -> Iterator[str]:
        yield from prompt

    @method(ordered=False)
    async def unordered(self, x: int) -> int:
        return x

    @method(concurrency=2)
    async def bounded(self, x: int) -> AsyncIterator[int]:
        yield x

    @method
    def five(self, a: int, b: int, c: int, d: int, e: int) -> int:
        return a + b + c + d + e

    @method
    def total(self, *xs: int) -> int:
        return sum(xs)

    @method
    def options(self, **xs: int) -> int:
        return sum(xs.values())

    @method
    async def later(self, **xs: int) -> int:
        return sum(xs.values())

    @method
    def optional(self, x: Tensor | None = None, y: int | float = 0) -> str:
        # A method that is called on `self` is a plain function.
        assert_type(local(self.sync)(1), str)
        return local(self.sync)(1)

    @method
    async def own(self) -> list[str]:
        number = await self.none() + local(self.five)(1, 2, 3, 4, 5)
        return [str(number), *[word async for word in self.tokens("to be")]]

    @method
    def lend(self, x: Tensor) -> Tensor:
        lent = aiodaft.borrow(x)
        assert_type(lent, Tensor)
        return lent

    @method
    async def ask(self, other: Model, x: int) -> str:
        answer = other.sync(x)
        assert_type(answer, Ref[str])
        return await answer

    @method
    async def send(self, out: Channel[Tensor], n: int) -> None:
        for index in range(n):
            await out.send(Tensor(index))
        await out.aclose()


class Lasting(Model, restart=Restart(intensity=3, period=60, backoff=aiodaft.Backoff(base=0.5, max=10))):
    """Is restarted, and gets back its state."""

    async def on_restart(self, epoch: int) -> None:
        self.gain = float(epoch)

    @method(idempotent=True, retries=2)
    async def again(self, x: int) -> int:
        assert_type(aiodaft.supervision.current_attempt(), int)
        assert_type(aiodaft.current_runtime(), aiodaft.Runtime)
        async with aiodaft.current_runtime().scope() as scope:
            assert_type(await scope.get_or_create("model", Derived, "cpu", gain=1.0), Derived)
            assert_type(await scope.spawn(Derived, "cpu"), Derived)
        return x


class Derived(Model):
    """Inherits remote methods."""

    @method
    async def more(self, x: float) -> float:
        return x


class LLM:
    """A class of another library."""

    def __init__(self, model: str) -> None:
        self.model = model

    def generate(self, prompts: list[str], max_tokens: int = 16) -> list[str]:
        return [prompt.upper()[:max_tokens] for prompt in prompts]

    async def agenerate(self, prompt: str) -> str:
        return prompt.upper()

    async def stream(self, prompt: str) -> AsyncIterator[str]:
        for word in prompt.split():
            yield word

    def stream_on_thread(self, prompt: str) -> Iterator[str]:
        yield from prompt.split()

    @staticmethod
    def count(text: str) -> int:
        return len(text)

    @classmethod
    async def name_of(cls, version: int) -> str:
        return f"{cls.__name__}-{version}"

    def __call__(self, prompt: str) -> str:
        return prompt


async def calls(rt: Runtime) -> None:
    """Single actors: handles, refs, streams."""
    async with rt.spawn(Model, "a") as a, rt.spawn(Model, "b", gain=3.0) as b:
        assert_type(a, Model)
        inp = Tensor(1)
        r0 = a.execute(inp)
        assert_type(r0, Ref[Tensor])
        assert_type(await r0, Tensor)
        assert_type(b.execute(r0), Ref[Tensor])
        assert_type(b.execute(r0, 2.0, n=3), Ref[Tensor])
        assert_type(b.execute(x=inp, scale=2.0), Ref[Tensor])
        assert_type(b.execute(r0, scale=2.0), Ref[Tensor])
        assert_type(b.execute(x=lazy(r0)), Ref[Tensor])
        assert_type(lazy(r0), Tensor)
        assert_type(a.sync(3), Ref[str])
        assert_type(await a.sync(3), str)
        assert_type(a.sync(b.none()), Ref[str])
        assert_type(a.two(r0, [inp, lazy(r0)]), Ref[dict[str, float]])
        assert_type(a.three(r0, b.none(), a.sync(2)), Ref[int])
        assert_type(a.three(inp, b.none(), "x"), Ref[int])
        assert_type(a.three(inp, 1, a.sync(2)), Ref[int])
        assert_type(a.none(), Ref[int])
        assert_type(await a.none(), int)
        assert_type(a.unordered(1), Ref[int])
        assert_type(a.lend(inp), Ref[Tensor])
        assert_type(a.ask(b, 1), Ref[str])
        assert_type(a.five(1, 2, 3, 4, a.none()), Ref[int])
        assert_type(a.five(a.none(), 2, a.none(), a.none(), 5), Ref[int])
        assert_type(await a.total(a.none(), a.none()), int)
        assert_type(await a.options(x=1), int)
        assert_type(await a.later(x=1), int)
        assert_type(await a.optional(r0, a.none()), str)
        assert_type(await a.own(), list[str])
        a.sync.tell(3)
        stream = a.tokens("hi there")
        assert_type(stream, Stream[str])
        async for token in stream:
            assert_type(token, str)
        assert_type([item async for item in a.bounded(1)], list[int])
        assert_type([item async for item in a.letters("hi")], list[str])
        async with a.tokens("hi there") as words:
            assert_type(await anext(words), str)


async def refs(rt: Runtime) -> None:
    """The methods of refs, also in asyncio's hands."""
    a = await rt.on(gpus=1).spawn(Model, "a")
    ref = a.none()
    assert_type(ref.done(), bool)
    assert_type(ref.cancelled(), bool)
    assert_type(await ref.value(), int)
    assert_type(await ref.ready(), None)
    assert_type(ref.exception(), BaseException | None)
    assert_type(ref.cancel(), bool)
    assert_type(await asyncio.gather(a.none(), a.sync(1)), tuple[int, str])
    assert_type(await asyncio.wait_for(a.none(), 5), int)
    assert_type(await asyncio.shield(a.none()), int)
    for completed in asyncio.as_completed([a.none(), a.none()]):
        assert_type(await completed, int)
    done, pending = await asyncio.wait([a.none(), a.none()], return_when=asyncio.FIRST_COMPLETED)
    assert_type(done, set[Ref[int]])
    assert_type([await ref for ref in done | pending], list[int])
    assert_type(await asyncio.gather(*(a.none() for _ in range(2))), list[int])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(a.none().value())
    assert_type(task.result(), int)
    weights = rt.put(Tensor(3))
    assert_type(weights, Ref[Tensor])
    assert_type(a.execute(weights), Ref[Tensor])
    assert_type(await weights.released(), None)
    with suppress(TypeError):  # it is none of torch's
        assert_type(await weights.into(Tensor()), Tensor)


def registered(registration: aiodaft.typing.Registration) -> None:
    """The result of `aiodaft.memory.register`."""
    with registration as entered:
        assert_type(entered, aiodaft.typing.Registration)
    assert_type(registration.close(), None)


async def owners(rt: Runtime) -> None:
    """Spawning, names, scopes, administration."""
    box = await rt.spawn(Box[int], 3)
    assert_type(box, Box[int])
    assert_type(await box.get(), int)
    assert_type(await rt.spawn(Box, "a"), Box[str])
    assert_type(await rt.group(1, Box[float], 1.5), Group[Box[float]])
    assert_type(await rt.spawn(list[int], [1]), Service[list[int]])
    spawning = rt.spawn(Model, "a")
    assert_type(spawning, Spawned[Model])
    a = await spawning
    assert_type(a, Model)
    assert_type(await rt.on(gpus=0, with_=a).spawn(Derived, "d"), Derived)
    await rt.name(a, "router")
    assert_type(await rt.lookup("router", Model), Model)
    assert_type(await rt.info(a), ActorInfo)
    assert_type((await rt.info(a)).pid, int | None)
    assert_type(await rt.nodes(patience=0.5), tuple[NodeInfo, ...])
    async with rt.scope() as scope:
        assert_type(scope, Scope)
        derived = await scope.spawn(Derived, "d")
        assert_type(await derived.more(1.0), float)
        assert_type(await derived.sync(1), str)
        await rt.kill(derived)
    await rt.stop(a)


async def groups(rt: Runtime) -> None:
    """Groups."""
    inp = Tensor(1)
    async with rt.group(2, Model, "w") as ws:
        assert_type(ws, Group[Model])
        everyone = ws.all(Model.execute, inp)
        assert_type(everyone, Refs[Tensor])
        assert_type(await everyone, list[Tensor])
        assert_type(everyone[0], Ref[Tensor])
        assert_type(everyone.gather(), Ref[list[Tensor]])
        async for ref in everyone:
            assert_type(ref, Ref[Tensor])
        assert_type(ws.all(Model.execute, everyone[0], scale=2.0), Refs[Tensor])
        assert_type(await ws.each(Model.execute, [Tensor(i) for i in range(2)]), list[Tensor])
        assert_type(await ws.each(Model.execute, everyone, n=3), list[Tensor])
        assert_type(ws[0].two(inp, lazy(everyone.gather())), Ref[dict[str, float]])
        assert_type(ws[0], Model)
        assert_type(ws[:1], Group[Model])
        assert_type(await ws[0].execute(inp), Tensor)
        assert_type(ws.any(Model.sync, 1), Ref[str])
        assert_type(ws.any(Model.sync, ws[0].none()), Ref[str])
        words = ws.any(Model.tokens, "to be")
        assert_type(ws.any(Model.tokens, ws[0].sync(1)), Stream[str])
        assert_type(words, Stream[str])
        assert_type([word async for word in words], list[str])
        async for text in ws.map(Model.sync, range(3)):
            assert_type(text, str)
        assert_type([member async for member in ws.map(Model.execute, everyone)], list[Tensor])
        async for text in ws.map(Model.sync, range(3), ordered=False):
            assert_type(text, str)
        assert_type([member async for member in ws.map(Model.execute, everyone, scale=2.0, ordered=True)], list[Tensor])
        async for maybe in ws.map(Model.sync, range(3), return_exceptions=True):
            assert_type(maybe, str | Exception)
        assert_type([text async for text in ws.map(Model.sync, ws[0].bounded(3))], list[str])

        async def prepare(new: list[Model]) -> list[str]:
            return await asyncio.gather(*(one.sync(1) for one in new))

        assert_type(await ws.resize(3, prepare=prepare), None)
        assert_type(await ws.heal(), list[int])
        assert_type(await ws.heal(3, prepare=prepare), list[int])
        await ws.remove(ws[0], *ws[1:])
    async with rt.group(4, Model, "w", axes={"dp": 2, "tp": 2}) as grid:
        assert_type(grid, Group[Model])
        assert_type(grid.axes, Mapping[str, int])
        replicas = grid.along("dp", result={"tp": -1})
        assert_type(replicas, Group[Model])
        assert_type(await replicas.each(Model.sync, [1, 2]), list[str])
        assert_type(
            grid.split(Model.two, Tensor(1), [inp, inp]) if not replicas else None, Refs[dict[str, float]] | None
        )
        assert_type(grid.with_policy(aiodaft.policies.two_choices).any(Model.sync, 1), Ref[str])
        await grid.resize(2, axes={"tp": 2})
        assert await grid.all(Model.neighbour) == ["1", "0"]


async def services(rt: Runtime) -> None:
    """Classes that know nothing of aiodaft."""
    async with rt.spawn(Model, "a") as a:
        svc = await rt.spawn(LLM, model="opt")
        assert_type(svc, Service[LLM])
        assert_type(svc.call(LLM.generate, ["a"], max_tokens=3), Ref[list[str]])
        assert_type(await svc.call(LLM.agenerate, a.sync(2)), str)
        assert_type(await a.three(Tensor(1), 1, svc.call(LLM.agenerate, "x")), int)
        async with rt.spawn(LLM, "other") as other:
            assert_type(other, Service[LLM])
        assert_type(svc.call(LLM.stream, "to be"), Stream[str])
        assert_type([word async for word in svc.call(LLM.stream, "to be")], list[str])
        assert_type(svc.call(LLM.stream_on_thread, "to be"), Stream[str])
        assert_type(svc.call(LLM.count, "four"), Ref[int])
        assert_type(await svc.call(LLM.name_of, 3), str)
        assert_type(svc.call(LLM.__call__, "hi"), Ref[str])
        assert_type(await svc.get("model"), Any)
        async with rt.group(2, LLM, "opt") as llms:
            assert_type(llms, ServiceGroup[LLM])
            assert_type(await llms.all(LLM.generate, ["a"], max_tokens=3), list[list[str]])
            assert_type(llms.all(LLM.agenerate, a.sync(2)), Refs[str])
            assert_type(await llms.each(LLM.agenerate, ["a", "b"]), list[str])
            assert_type(llms.any(LLM.agenerate, "a"), Ref[str])
            assert_type(llms.any(LLM.stream, "a"), Stream[str])
            async for text in llms.map(LLM.agenerate, ["a", "b", "c"]):
                assert_type(text, str)
            async for text in llms.map(LLM.agenerate, ["a", "b", "c"], ordered=False):
                assert_type(text, str)
            assert_type(llms[0], Service[LLM])
            assert_type(llms[:1], ServiceGroup[LLM])
            assert_type([service async for service in llms[:1].map(LLM.generate, [["a"]])], list[list[str]])
            await rt.kill(llms[1])
            await rt.name(llms[0], "llm")
            assert_type(await rt.lookup("llm", LLM), Service[LLM])
            await rt.stop(llms)


async def dataflows(rt: Runtime) -> None:
    """Channels and compiled graphs."""
    async with rt.spawn(Model, "a") as a, rt.spawn(Model, "b") as b:
        channel: Channel[Tensor] = Channel(capacity=2)
        sending = a.send(channel, 3)
        assert_type(sending, Ref[None])
        assert_type(await channel.recv(), Tensor)
        async for item in channel:
            assert_type(item, Tensor)
        await sending

        def pipeline(x: Ref[Tensor]) -> Ref[Tensor]:
            return b.execute(a.execute(x))

        async with aiodaft.compile(pipeline) as fast:
            assert_type(fast, Graph[[Tensor], Ref[Tensor]])
            assert_type(fast(Tensor(1)), Ref[Tensor])
            assert_type((await fast(Tensor(1))).v, float)

        def both(x: Ref[Tensor]) -> tuple[Ref[Tensor], Ref[str]]:
            return b.execute(x), b.sync(3)

        async with aiodaft.compile(both) as graph:
            first, second = graph(Tensor(1))
            assert_type(first, Ref[Tensor])
            assert_type(await second, str)
            await first

        async with aiodaft.compile(a.none) as constant:
            assert_type(await constant(), int)


class Stage(aiodaft.Actor):
    """Takes part in a pipeline."""

    @method
    def start(self, batch: list[Tensor] | None) -> None: ...

    @method
    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor | None:
        return x

    @method
    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        return gradient

    @method
    def weights(self, stage: int, microbatch: int) -> None: ...

    @method
    def finish(self, done: list[None]) -> int:
        return len(done)


async def collectives(rt: Runtime) -> None:
    """Collectives on refs keep the types of the values."""
    async with rt.spawn(Derived, "a") as a, rt.spawn(Derived, "b") as b:
        numbers = [rt.put(1), rt.put(2)]
        await assert_type(aiodaft.all_reduce(numbers), Refs[int])
        await assert_type(aiodaft.all_reduce(numbers, lambda x, y: x - y, algorithm="tree"), Refs[int])
        await assert_type(aiodaft.reduce(numbers, "max", root=1), Ref[int])
        await assert_type(aiodaft.all_gather(numbers), Refs[list[int]])
        await assert_type(aiodaft.gather(aiodaft.all_reduce(numbers)), Ref[list[int]])
        assert await assert_type(aiodaft.broadcast(numbers[0], to=[a, b]), Refs[int]) == [1, 1]
        assert await assert_type(aiodaft.scatter(aiodaft.gather(numbers), to=[a, b]), Refs[int]) == [1, 2]
        await assert_type(aiodaft.all_to_all(aiodaft.all_gather(numbers)), Refs[list[int]])
        assert await aiodaft.all_reduce(numbers, min) == [1, 1]
        done = await aiodaft.collectives.among_survivors(aiodaft.all_reduce, numbers, "max", algorithm="tree")
        assert_type(done, aiodaft.collectives.Survivors[int])
        ranks, totals = done
        assert_type(ranks, tuple[int, ...])
        assert_type(totals, Refs[int])
        assert_type((await aiodaft.collectives.among_survivors(aiodaft.all_gather, numbers)).refs, Refs[list[int]])


async def supervised(rt: Runtime) -> None:
    """Restart policies, for one and for siblings."""
    async with rt.scope(restart=Restart(strategy="one_for_all")) as siblings:
        lasting = await siblings.spawn(Lasting, "l")
        assert_type(lasting, Lasting)
        assert_type(lasting.again(1), Ref[int])
        await siblings.on(restart="temporary", name="helper").spawn(Derived, "h")
        assert_type(await rt.lookup("helper", Derived), Derived)
        info = await rt.info(lasting)
        async with rt.trace("run.json", limit=10, patience=1) as trace:
            assert_type(trace.left_out, dict[str, str])
        assert_type((info.epoch, info.restarts, info.last_error), tuple[int, int, BaseException | None])
    pinned = await rt.on(restart=Restart("transient", follow=False)).spawn(Derived, "p")
    assert_type(pinned, Derived)
    await rt.stop(pinned)
    try:
        pass
    except* aiodaft.exceptions.RestartLimitReached as group:
        for error in group.exceptions:
            if isinstance(error, aiodaft.exceptions.RestartLimitReached):
                assert_type(error.attempts, tuple[BaseException, ...])
    except* aiodaft.exceptions.StaleHandle:
        pass


async def pipelines(rt: Runtime) -> None:
    """Schedules."""
    async with rt.spawn(Stage) as a, rt.spawn(Stage) as b:
        results = drive(one_f_one_b(2, 3), [a, b], [Tensor(1)])
        assert_type(results, list[Ref[Any]])
        assert len(results) == 2


class Sharded(aiodaft.Actor):
    """Has a shard, of no tensors."""

    @method
    async def state(self) -> dict[str, torch.Tensor]:
        return {}

    @method
    async def load(self, state: dict[str, torch.Tensor]) -> int:
        return len(state)


async def resharding(rt: Runtime) -> None:
    """Layouts and plans."""
    layout = aiodaft.resharding.Layout({"pp": 1, "tp": 1}, {})
    plan = aiodaft.resharding.reshard(layout, aiodaft.resharding.Layout({}, {}), colocated=False)
    assert_type(plan, aiodaft.resharding.ReshardPlan)
    assert_type(plan.received, tuple[int, ...])
    group = await rt.group(1, Sharded)
    new = await plan.move(group.all(Sharded.state), to=group)
    assert_type(new, aiodaft.resharding.Sharded)
    assert_type(await group.each(Sharded.load, new), list[int])


async def queues(rt: Runtime) -> None:
    """A transfer queue."""
    async with open_queue(rt, {"train": ["x"], "eval": Wants(["x"], at_once)}, capacity=8, storages=2) as queue:
        assert_type(queue, TransferQueue)
        assert_type(await queue.put({"x": [1, 2]}), list[int])
        async with queue.consumer("eval") as consumer:
            assert_type(consumer, Consumer)
            batch = await consumer.take(4)
            assert_type(batch, Batch)
            assert_type(batch.fields, dict[str, list[Any]])
            await consumer.acknowledge(batch)


async def main() -> str:
    """Run all of it."""
    async with Runtime(gpus=8) as rt:
        assert_type(rt, Runtime)
        registered(aiodaft.typing.Registration(list))
        for part in (
            calls,
            refs,
            owners,
            groups,
            services,
            dataflows,
            supervised,
            resharding,
            queues,
            collectives,
            pipelines,
        ):
            await part(rt)
    started = await aiodaft.start()
    assert_type(started, Runtime)
    await aiodaft.stop()
    return "all of it ran"


if __name__ == "__main__":
    print(assert_type(aiodaft.run(main()), str))
