"""Deadlines (row CR6; A14-A17 of the fault tests)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from actors import Sleeper
from cancelled import Subject
from inside import peer_of, producer_of, resources_of
from leaks import is_alive

import aiodaft
from aiodaft._protocol.diagnostics.trace import TraceContext
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.calls.call import CallSink, Request
from aiodaft._runtime.platform.tasks import Terms, current_terms, deadline_of, received_terms, sent_terms
from aiodaft.exceptions import RemoteProtocolError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_a_deadline_ends_the_call_here_and_there(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    with pytest.raises(aiodaft.DeadlineExceeded) as caught:
        async with aiodaft.deadline(0.1):
            await sleeper.sleep(60)
    assert caught.value.executed is None
    assert "sleep cleaned up" in await sleeper.history()


async def test_what_the_runtime_tells_itself_has_no_deadline(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper, peer = await rt.spawn(Sleeper), peer_of(rt)
    process = PeerId(producer_of(sleeper.sleep(0)))
    deadlines: list[float | None] = []

    class Sends(CallSink):
        def submit(self, request: Request) -> None:
            deadlines.append(deadline_of(current_terms.get()))
            peer.caller.direct.submit(request)

    monkeypatch.setattr(peer.caller, "outgoing", Sends())
    async with aiodaft.deadline(60):
        sleeper.sleep.tell(0)
        # A ref that is dropped in a block that is late must be free nevertheless.
        peer.give_back(process, CallId(0))
    assert [deadline is None for deadline in deadlines] == [False, True]


@pytest.mark.parametrize("awaited", ["inside", "outside"])
async def test_cleanup_here_and_there_has_run_when_a_deadline_ends_a_call(rt: aiodaft.Runtime, awaited: str) -> None:
    outer, inner = await rt.spawn(Subject), await rt.spawn(Subject)
    # The first to notice differs: the caller, the actor, or the one that it calls.
    for number in range(20):
        with pytest.raises(aiodaft.DeadlineExceeded):
            async with aiodaft.deadline(0.02 + number / 10_000):
                ref = outer.call(inner)
                if awaited == "inside":
                    await ref
            await ref
        events = await inner.history()
        assert events.count("cleaned up") == events.count("began")
        assert not (await rt.info(outer)).abandoned
    assert events


async def test_a_call_that_is_cancelled_has_its_grace_time_also_if_its_deadline_passes(rt: aiodaft.Runtime) -> None:
    actor = await rt.spawn(Subject)
    async with aiodaft.deadline(0.05):
        ref = actor.stubborn(None)
        await actor.has_begun()
        ref.cancel()
    with pytest.raises(aiodaft.CallCancelled, match="grace time"):
        await ref
    assert await actor.history() == ["began", "refused"]
    await actor.let_go()


@pytest.mark.asyncio(loop_scope="function")
async def test_who_does_not_obey_a_deadline_has_the_grace_time(hasty_rt: aiodaft.Runtime) -> None:
    actor = await hasty_rt.spawn(Subject)
    async with aiodaft.deadline(0.05):
        ref = actor.stubborn(None)
    with pytest.raises(aiodaft.DeadlineExceeded, match=r"deadline of Subject\.stubborn of Subject-1 passed") as caught:
        await ref
    assert caught.value.executed is None
    assert await actor.history() == ["began", "refused"]
    assert (await hasty_rt.info(actor)).abandoned == 1
    await actor.let_go()


@pytest.mark.parametrize("how", ["give", "raise"])
async def test_what_a_call_gives_or_raises_after_its_deadline_is_too_late(rt: aiodaft.Runtime, how: str) -> None:
    actor = await rt.spawn(Subject)
    async with aiodaft.deadline(0.05):
        ref = actor.give_in_late(how)
    with pytest.raises(aiodaft.DeadlineExceeded, match=r"deadline of Subject\.give_in_late") as caught:
        await ref
    assert caught.value.executed is None
    # If its error could travel, and if not.
    assert ("ValueError" in str(getattr(caught.value, "__notes__", ""))) is (how == "raise")
    assert await actor.history() == ["cleaned up"]


async def test_a_step_of_a_graph_that_gives_something_after_its_deadline_is_the_last(rt: aiodaft.Runtime) -> None:
    actor = await rt.spawn(Subject)

    def flow(how: aiodaft.Ref[str]) -> aiodaft.Ref[None]:
        return actor.use(actor.give_in_late(how))

    async with aiodaft.compile(flow) as graph:
        async with aiodaft.deadline(0.05):
            run = graph("give")
        with pytest.raises(aiodaft.DeadlineExceeded, match=r"deadline of Subject\.give_in_late"):
            await run
        assert await actor.history() == ["cleaned up"]


async def test_a_call_never_starts_if_its_deadline_passes_in_the_queue(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    running = sleeper.block(20)
    await sleeper.history()
    ref: Any = None
    with pytest.raises(aiodaft.DeadlineExceeded):
        async with aiodaft.deadline(0.05):
            ref = sleeper.block(20)
            await asyncio.sleep(60)
    with pytest.raises(aiodaft.DeadlineExceeded) as caught:
        await ref
    assert caught.value.executed is False
    # The actor knows of no deadline of this one: it is cancelled from here.
    ref = sleeper.block(20)
    with pytest.raises(
        aiodaft.DeadlineExceeded, match=r"not done within .* Sleeper\.block of Sleeper-\d+ was"
    ) as awaited:
        async with aiodaft.deadline(0.01):
            await ref
    assert awaited.value.executed is False
    await sleeper.unblock()
    assert await running == "unblocked"
    assert (await sleeper.history()).count("block began") == 1


async def test_deadlines_travel_to_nested_calls_and_only_shrink(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Sleeper), await rt.spawn(Sleeper)
    assert await a.time_left(b) == float("inf")
    async with aiodaft.deadline(5):
        direct, nested = await a.time_left(), await a.time_left(b)
        assert 0 < nested <= direct + 0.002 <= 5.002
        async with aiodaft.deadline(50):
            assert await a.time_left(b) <= 5.002
        async with aiodaft.deadline(2):
            assert await a.time_left(b) <= 2.002


async def test_what_is_left_of_a_deadline_is_rounded_up_to_microseconds() -> None:
    assert sent_terms(Terms(1.5), lambda: 1.0) == 500_000
    assert sent_terms(Terms(1.0 + 1e-9), lambda: 1.0) == 1
    assert sent_terms(Terms(1.0), lambda: 2.0) == 0


async def test_terms_of_a_call_that_are_none_are_refused() -> None:
    trace = TraceContext("00-1-2-01")
    sent = sent_terms(Terms(1.5, trace), lambda: 1.0)
    assert isinstance(sent, tuple)
    assert received_terms(sent, lambda: 2.0) == Terms(2.5, trace)
    wrong: list[tuple[Any, ...]] = [
        (),
        (1,),
        (1.5, "a", "b", "c"),
        (None, "a", "b"),
        (None, "a", "b", b"c"),
        (*sent, "d"),
    ]
    for terms in wrong:
        with pytest.raises(RemoteProtocolError, match="a call came with a trace"):
            received_terms(terms, lambda: 1.0)


async def test_deadlines_do_not_look_at_the_clock_on_the_wall(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await rt.spawn(Sleeper), await rt.spawn(Sleeper)
    for hours in (1, -1):
        for jump in (a.jump(hours), b.jump(hours)):
            await jump
        elsewhen = time.time() + 3600 * hours
        monkeypatch.setattr(time, "time", lambda then=elsewhen: then)
        async with aiodaft.deadline(50):
            assert 0 < await a.time_left(b) <= 50.002
        with pytest.raises(aiodaft.DeadlineExceeded):
            async with aiodaft.deadline(0.05):
                await a.call(b, 60)
        events = await b.history()
        assert events.count("nested cleaned up") == events.count("nested began")


async def test_a_call_that_begins_when_one_with_a_deadline_ends_has_none(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    async with aiodaft.deadline(50):
        first = sleeper.time_left_alone()
    second = sleeper.time_left_alone()
    await sleeper.unblock()
    assert await first <= 50.002
    assert await second == float("inf")


@pytest.mark.parametrize("how", ["spawn", "scope", "kill"])
async def test_what_is_cleared_up_after_a_deadline_is_cleared_up_in_full(rt: aiodaft.Runtime, how: str) -> None:
    pids: list[int] = []

    async def outlive(owner: aiodaft.Runtime | aiodaft.Scope) -> None:
        async with owner.on(gpus=4).spawn(Sleeper) as sleeper:
            pids.append((await rt.info(sleeper)).pid)
            try:
                await asyncio.sleep(60)
            finally:
                if how == "kill":
                    await rt.kill(sleeper)

    with pytest.raises(aiodaft.DeadlineExceeded, match="not done within 0.3 s"):
        async with aiodaft.deadline(0.3):
            if how == "scope":
                async with rt.scope() as scope:
                    await outlive(scope)
            else:
                await outlive(rt)
    assert not any(map(is_alive, pids))
    assert (await resources_of(rt))[1]["gpus"] == 4
