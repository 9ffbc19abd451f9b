"""Calls that an actor refuses because too many wait there (`max_queue`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from overloaded import Bounded, OnThread, Plain
from supervised import Responder

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def refused(call: Any, method: str, max_queue: int) -> None:
    actor = method.partition(".")[0]
    why = rf"{method} of {actor}-.*: max_queue={max_queue}, and so many calls"
    with pytest.raises(aiodaft.Overloaded, match=why) as caught:
        await call
    assert caught.value.executed is False


async def test_a_method_refuses_calls_beyond_its_bound_from_every_caller(rt: aiodaft.Runtime) -> None:
    actor = await rt.spawn(Bounded)
    caller = await rt.spawn(Responder, actor)
    refs = [actor.hold(index) for index in range(4)]
    await refused(actor.hold(9), "Bounded.hold", 3)
    with pytest.raises(aiodaft.Overloaded, match=r"Bounded.hold of Bounded-\d+ .* is refused"):
        await caller.ask("hold", 9)
    # Other methods have no bound.
    assert await actor.echo(1) == 1
    assert (await rt.info(actor)).queued == 3
    await actor.open()
    assert await asyncio.gather(*refs) == [0, 1, 2, 3]
    assert await actor.hold(9) == 9


async def test_an_actor_refuses_every_call_while_too_many_wait_for_its_thread(rt: aiodaft.Runtime, fifo: Path) -> None:
    actor = await rt.spawn(OnThread)
    running, waiting = actor.hold(str(fifo)), actor.double(1)
    await refused(actor.double(2), "OnThread.double", 1)
    # A large argument of a call that is refused is not fetched, and its memory is free again.
    await refused(actor.size(bytes(8 << 20)), "OnThread.size", 1)
    with pytest.raises(aiodaft.Overloaded, match="OnThread.numbers"):
        await anext(actor.numbers())
    # A call that is cancelled while it waits makes room.
    waiting.cancel()
    await waiting.ready()
    waiting = actor.double(3)
    await asyncio.to_thread(fifo.write_text, "on")
    assert (await running, await waiting) == ("on", 6)
    assert await actor.size(bytes(8 << 20)) == 8 << 20


async def test_on_overrides_the_class_line_and_bounds_hosted_classes(rt: aiodaft.Runtime, fifo: Path) -> None:
    actor = await rt.on(max_queue=2).spawn(OnThread)
    refs = [actor.hold(str(fifo)), actor.double(1), actor.double(2)]
    await refused(actor.double(3), "OnThread.double", 2)
    await asyncio.to_thread(fifo.write_text, "on")
    assert await asyncio.gather(*refs) == ["on", 2, 4]
    service = await rt.on(max_queue=1).spawn(Plain)
    held = [service.call(Plain.hold, str(fifo)) for _ in range(2)]
    await refused(service.call(Plain.hold, str(fifo)), "Plain.hold", 1)
    await rt.kill(service)
    for ref in held:
        assert await ref.ready() is None
        assert isinstance(ref.exception(), aiodaft.ActorDied)


async def test_steps_of_graphs_are_not_refused(rt: aiodaft.Runtime, fifo: Path) -> None:
    actor = await rt.spawn(OnThread)
    async with aiodaft.compile(lambda value: actor.double(value)) as graph:
        running = actor.hold(str(fifo))
        runs = [graph(index) for index in range(10)]
        waiting = actor.double(1)
        await refused(actor.double(2), "OnThread.double", 1)
        await asyncio.to_thread(fifo.write_text, "on")
        assert await running == "on"
        assert await asyncio.gather(*runs) == [2 * index for index in range(10)]
        assert await waiting == 2


async def test_a_bound_is_a_positive_integer(rt: aiodaft.Runtime) -> None:
    with pytest.raises(ValueError, match="on: `max_queue` is a positive integer, not 0"):
        rt.on(max_queue=0)
    with pytest.raises(ValueError, match=r"test_a_bound.*f: `max_queue` is a positive integer, not -1"):

        @aiodaft.method(max_queue=-1)
        def f(self: Any) -> None: ...
