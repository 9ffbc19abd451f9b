"""Planted errors: a checker must report each of the marked lines, and no other."""

# ruff: noqa: B018, F841 - the mistakes under test

from __future__ import annotations

from good import LLM, Model, Tensor

import aiodaft
from aiodaft import Channel, Ref, Runtime
from aiodaft.collectives import among_survivors
from aiodaft.typing import lazy


async def spawning(rt: Runtime) -> None:
    await rt.spawn(Model)  # E01 a constructor argument is missing
    await rt.spawn(Model, 3)  # E02 a constructor argument of the wrong type
    await rt.spawn(LLM, 3)  # E24 an argument of the wrong type for a plain class
    (await rt.spawn(Model, "x", gian=1.0))  # E25 an unknown constructor argument
    rt.spawn(Model, "x").execute(Tensor())  # E26 forgot await
    await rt.on(gpus=1, nodes="n2").spawn(Model, "x")  # E27 an unknown placement
    await rt.get_or_create("model", Model, 3)  # E53 a constructor argument of the wrong type
    await rt.on(name="model", lifetime="for ever").spawn(Model, "x")  # E54 an unknown lifetime
    await rt.stop(rt.spawn(Model, "x"))  # E68 forgot await


async def calls(b: Model) -> None:
    s = b.sync(1)
    b.execute("no")  # E03 a value of the wrong type
    b.execute(s)  # E04 a ref of the wrong type
    b.execute(b.none(), n=2)  # E05 a ref of the wrong type beside a keyword
    b.execute(Tensor(), n="x")  # E06 a keyword of the wrong type
    b.execute(b.execute(Tensor()), m=1)  # E07 an unknown keyword after a ref
    b.execute()  # E08 an argument is missing
    b.nope()  # E09 an unknown method
    x: int = b.none()  # E10 forgot await
    b.execute(Tensor()) + 1  # E11 forgot await
    b.three("no", b.none(), "x")  # E12 a value of the wrong type beside a ref
    b.execute(x=lazy(s))  # E13 a ref of the wrong type through lazy
    b.execute(x=s)  # E14 a ref by keyword
    if b.none() > 3:  # E22 forgot await
        pass
    b.tokens("x").upper()  # E23 a stream is not its items
    await b.tokens("x")  # E28 a stream is not awaited
    y: Ref[int] = b.sync(1)  # E29 a ref of another type
    b.sync.tell("no")  # E30 a value of the wrong type, told


async def groups(rt: Runtime) -> None:
    ws = await rt.group(4, Model, "w")
    ws.all(Model.execute, "no")  # E15 a value of the wrong type for all
    ws.each(Model.execute, [1, 2])  # E16 items of the wrong type
    (await ws.all(Model.none)).foo  # E17 a list has no such attribute
    await rt.group(4, Model, "w", axes=["dp"])  # E55 axes are a mapping
    await rt.group("4", Model, "w")  # E31 not a number of members
    ws.along("dp").each(Model.execute, [1])  # E56 items of the wrong type
    ws.split(Model.execute, [Tensor()])  # E57 a batch of another type than the argument
    ws.all(Model.tokens, "x")  # E32 a stream for all
    ws.map(Model.execute, ["no"], ordered=False)  # E45 items of the wrong type, in any order

    async def prepare(new: list[LLM]) -> None: ...

    await ws.resize(5, prepare=prepare)  # E61 members of another class are prepared
    await ws.remove(1)  # E62 a rank is no member
    await among_survivors(aiodaft.all_reduce, [1])  # E63 values are no refs
    await among_survivors(aiodaft.all_gather, ws.all(Model.sync, 1), "sum")  # E64 no argument of the collective


async def services(rt: Runtime, b: Model) -> None:
    svc = await rt.spawn(LLM, "opt")
    svc.call(LLM.generate, 3)  # E18 a value of the wrong type
    await svc.call(Model.execute, Tensor())  # E19 a method of another class
    await svc.call(LLM.agenerate, b.none())  # E20 a ref of the wrong type
    y: str = await svc.call(LLM.generate, ["a"])  # E21 a list is not its item
    await svc.call(LLM.stream, "a")  # E46 a stream is not awaited
    svc.call(LLM.count, 3)  # E47 a value of the wrong type for a static method
    svc.generate(["a"])  # E48 a service has no methods of its own
    llms = await rt.group(2, LLM, "opt")
    llms.all(LLM.generate, 3)  # E49 a value of the wrong type for all
    llms.map(LLM.agenerate, [1])  # E50 items of the wrong type
    llms.all(LLM.stream, "a") + 1  # E51 refs are no numbers
    await rt.group(2, LLM, 3)  # E52 the same for a group


async def dataflows(rt: Runtime, channel: Channel[Tensor], a: Model) -> None:
    await channel.send(3)  # E33 an item of the wrong type
    text: str = await channel.recv()  # E34 an item of another type

    def pipeline(x: Ref[Tensor]) -> Ref[Tensor]:
        return a.execute(x)

    async with aiodaft.compile(pipeline) as fast:
        fast(3)  # E35 an input of the wrong type

    def eager_too(x: Tensor) -> Ref[Tensor]:
        return a.execute(x)

    async with aiodaft.compile(eager_too) as either:
        either(3)  # E69 an input of the wrong type, of a function that is also called eagerly
    number: int = rt.put(3)  # E36 forgot await
    count: int = await rt.put(Tensor()).into(Tensor())  # E38 `into` returns its target
    lent: Ref[Tensor] = aiodaft.borrow(Tensor())  # E37 a lent value has the type of the value


async def supervision(rt: Runtime) -> None:
    aiodaft.Restart("always")  # E39 not a kind
    aiodaft.Restart(strategy="all")  # E40 not a strategy
    rt.on(restart="one_for_all")  # E41 not a kind
    rt.scope(restart="permanent")  # E42 not a policy
    wrong: int = await rt.lookup("model", Model)  # E43 a handle of another type
    aiodaft.method(retries="twice")  # E44 not a number of retries


async def resharding(rt: Runtime, layout: aiodaft.resharding.Layout) -> None:
    aiodaft.resharding.Sharding(shape="2", dims={0: "tp"})  # E58 no dtype
    plan = aiodaft.resharding.reshard(layout, {"tp": 3})  # E59 not a layout
    models = await rt.group(2, Model, "w")
    await plan.move(models.all(Model.sync, 1), to=models)  # E60 results that are no shards


async def keyed(group: aiodaft.typing.CurrentGroup[Model]) -> None:
    text: str = await group.all_reduce(1, key="x")  # E65 a result of another type
    group.all_reduce(1, "avg")  # E66 no such op
    group.barrier(key=1.5)  # E67 no key
