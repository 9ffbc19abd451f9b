"""Cancellation (row CR6; group B of the fault tests)."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from actors import Box, Echo, Log, Relay, Sleeper
from cancelled import Blocking, Boss, Clinging, Subject
from inside import errors_kept_by, failed_refs_of, peer_of
from leaks import is_alive
from log_ear import listening

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_a_timeout_around_the_only_awaiter_runs_the_remote_cleanup_first(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await sleeper.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    # The await returned only when the cleanup had run, so no waiting is needed here.
    assert await sleeper.history() == ["sleep began", "sleep cleaned up"]


async def test_the_await_waits_for_a_remote_cleanup_that_waits(rt: aiodaft.Runtime) -> None:
    subject = await rt.spawn(Subject)
    task = asyncio.get_running_loop().create_task(subject.linger().value())
    while not (await rt.info(subject)).running:
        pass
    task.cancel()
    await subject.has_begun()
    # The cancellation is there, and the cleanup under way.
    await rt.info(subject)
    assert not task.done()
    await subject.let_go()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await subject.history() == ["cleaned up"]


async def test_the_remote_cleanup_runs_within_a_tenth_of_a_second(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    delays: list[float] = []
    for number in range(1, 21):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01) as limit:
                await sleeper.sleep(60)
        expired = limit.when()
        assert expired is not None
        delays.append(asyncio.get_running_loop().time() - expired)
        # A timeout may come before the call has begun.
        history = await sleeper.history()
        assert history.count("sleep cleaned up") == history.count("sleep began") <= number
    # The fastest one says how it is done; the others, how busy the machine is.
    assert min(delays) < 0.1


async def test_the_end_of_a_cancelled_call_is_a_few_bytes(rt: aiodaft.Runtime) -> None:
    """Thousands may be cancelled at a time, when clients leave."""
    sleeper = await rt.spawn(Sleeper)
    calls = [sleeper.sleep(60) for _ in range(100)]
    await sleeper.history()
    before = rt.traffic().control_received
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert rt.traffic().control_received - before < 4000
    with pytest.raises(aiodaft.CallCancelled, match=r"^Sleeper.sleep of Sleeper-\d+ was cancelled$") as caught:
        await calls[0]
    assert caught.value.executed is None


@pytest.mark.parametrize("how", ["task", "wait_for", "gather", "anyio", "group"])
async def test_every_way_of_cancelling_reaches_the_remote_call(rt: aiodaft.Runtime, how: str) -> None:
    sleeper = await rt.spawn(Sleeper)

    async def cancelled_task() -> None:
        task = asyncio.get_running_loop().create_task(sleeper.sleep(60).value())
        await sleeper.history()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    async def wait_for() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sleeper.sleep(60), 0.05)

    async def gather() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.gather(sleeper.sleep(60), sleeper.sleep(60))

    async def with_anyio() -> None:
        with anyio.move_on_after(0.05) as scope:
            await sleeper.sleep(60)
        assert scope.cancelled_caught

    async def group() -> None:
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sleeper.sleep(60).value())
                await sleeper.history()
                raise ZeroDivisionError

    routes = {"task": cancelled_task, "wait_for": wait_for, "gather": gather, "anyio": with_anyio, "group": group}
    await routes[how]()
    history = await sleeper.history()
    assert history.count("sleep cleaned up") == history.count("sleep began") > 0


async def test_a_task_that_is_cancelled_before_its_first_step_gives_up_the_call(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    refs = [sleeper.sleep(60) for _ in range(3)]
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(ref.value()) for ref in (*refs, refs[2])]
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(refs[0].value())
            raise ZeroDivisionError
    for task in tasks[:3]:
        task.cancel()
    await asyncio.wait(tasks[:3])
    # The last one is awaited by another task, too.
    assert [task.cancelled() for task in tasks[:3]] == [True, True, True]
    assert [ref.cancelled() for ref in refs] == [True, True, False]
    refs[2].cancel()
    await asyncio.wait(tasks)


async def test_a_call_that_is_cancelled_gives_up_the_calls_that_it_did_not_come_to_await(rt: aiodaft.Runtime) -> None:
    sleeper, boss = await rt.spawn(Sleeper), await rt.spawn(Boss)
    call = boss.fan_out(sleeper)
    assert await sleeper.sleep(0, "last") == "last"
    while "later began" not in await sleeper.history():
        pass
    call.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await call
    while len(over := {event for event in await sleeper.history() if event.endswith("cleaned up")}) < 3:
        pass
    # Not the calls that it keeps for later, had dropped before, or has begun in its cleanup.
    assert over == {"first cleaned up", "second cleaned up", "last cleaned up"}
    assert "goodbye began" in await sleeper.history()


async def test_with_another_awaiter_the_call_goes_on(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    ref = log.after_gate("kept")
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(ref.value())
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await ref
        await log.open_gate()
    assert waiting.result() == "kept"


async def test_asyncio_wait_counts_as_an_awaiter(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    ref = log.after_gate("kept")
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(asyncio.wait([ref]))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await ref
        await log.open_gate()
    assert waiting.result()[0] == {ref}
    assert await ref == "kept"


async def test_a_ref_that_was_passed_on_is_not_cancelled_with_its_awaiter(rt: aiodaft.Runtime) -> None:
    log, echo = await rt.spawn(Log), await rt.spawn(Echo)
    ref = log.after_gate("kept")
    used = echo.echo(ref)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await ref
    await log.open_gate()
    assert await used == "kept"


async def test_a_borrowed_ref_is_not_cancelled_with_its_awaiter(rt: aiodaft.Runtime) -> None:
    log, relay = await rt.spawn(Log), await rt.spawn(Relay)
    ref = log.after_gate("kept")
    await relay.hold(Box(ref))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await ref
    await log.open_gate()
    assert await relay.read_held() == "kept"


async def test_ref_cancel_always_cancels(rt: aiodaft.Runtime) -> None:
    sleeper, echo = await rt.spawn(Sleeper), await rt.spawn(Echo)
    ref = sleeper.sleep(60)
    used = echo.echo(ref)
    await sleeper.history()
    assert ref.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await ref
    with pytest.raises(aiodaft.CallCancelled):
        await used
    assert ref.cancelled()
    assert not ref.cancel()
    assert await sleeper.history() == ["sleep began", "sleep cleaned up"]


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("lets_go", [True, False])
async def test_calls_that_wait_for_a_cancelled_result_do_not_get_what_is_dropped(
    hasty_rt: aiodaft.Runtime, lets_go: bool
) -> None:
    stubborn, other = await hasty_rt.spawn(Subject), await hasty_rt.spawn(Subject)
    neighbour = await hasty_rt.on(with_=stubborn).spawn(Subject)
    # The two processes know each other.
    await other.use(stubborn.make())
    ref = stubborn.stubborn(other)
    used = [actor.use(argument) for actor in (other, neighbour) for argument in (ref, [ref])]
    await stubborn.has_begun()
    assert ref.cancel()
    used.append(other.use(ref))
    if lets_go:
        await stubborn.let_go()
    for waiting in (ref, *used):
        with pytest.raises(aiodaft.CallCancelled):
            await waiting
    await stubborn.let_go()
    assert (await other.history(), await neighbour.history()) == (["used"], [])


async def test_the_death_of_an_actor_does_not_change_the_answer_of_a_cancelled_call(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    refs = [sleeper.stubborn(60), sleeper.stubborn(60)]
    await sleeper.history()
    for ref in refs:
        ref.cancel()
    del refs[1], ref
    last = sleeper.stubborn(60)
    await rt.kill(sleeper)
    with pytest.raises(aiodaft.ActorDied):
        await last
    assert len(errors_kept_by(rt)) == 0
    assert not failed_refs_of(rt)


async def test_a_queued_call_is_dropped(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    running = sleeper.block(20)
    await sleeper.history()
    queued = sleeper.block(20)
    queued.cancel()
    with pytest.raises(aiodaft.CallCancelled, match="before it started") as caught:
        await queued
    assert caught.value.executed is False
    await sleeper.unblock()
    assert await running == "unblocked"
    assert (await sleeper.history()).count("block began") == 1


async def test_a_call_that_waits_for_its_argument_is_dropped(rt: aiodaft.Runtime) -> None:
    log, other = await rt.spawn(Log), await rt.spawn(Log)
    waiting = log.note(other.after_gate("never"))
    later = log.note("later")
    waiting.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await waiting
    await later
    assert await log.all() == ["later"]
    await other.open_gate()


async def abandoned(rt: aiodaft.Runtime, actor: object, count: int) -> aiodaft.state.ActorInfo:
    """Wait until an actor has so many calls without a caller that waits."""
    while (info := await rt.info(actor)).abandoned != count:
        pass
    return info


async def test_a_thread_cannot_be_interrupted_but_its_result_is_dropped(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    ref = sleeper.block(20)
    await sleeper.history()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await ref
    with pytest.raises(aiodaft.CallCancelled, match="a thread cannot be interrupted") as caught:
        await ref
    assert caught.value.executed is None
    assert (await abandoned(rt, sleeper, 1)).running == ("Sleeper.block",)
    behind = sleeper.block(20)
    behind.cancel()
    way_out = "started: Sleeper.block, which was given up, still has the thread of the actor; `rt.kill` ends it"
    with pytest.raises(aiodaft.CallCancelled, match=way_out):
        await behind
    with pytest.raises(aiodaft.DeadlineExceeded, match=way_out):
        async with aiodaft.deadline(0.05):
            await sleeper.block(20)
    await sleeper.unblock()
    await abandoned(rt, sleeper, 0)
    next_one = sleeper.block(20)
    await sleeper.history()
    await sleeper.unblock()
    assert await next_one == "unblocked"
    assert (await rt.info(sleeper)).stored_bytes == 0


async def test_a_method_on_a_thread_gets_no_grace_time() -> None:
    # With such a grace time, a wait for any of it, also for that of the actors when they are stopped, is a hang.
    async with aiodaft.Runtime(preload=(), cancel_grace=3600, stop_grace=0) as rt:
        subject, other, service = await rt.spawn(Subject), await rt.spawn(Subject), await rt.spawn(Blocking)
        neighbour = await rt.on(with_=other).spawn(Subject)
        for one in (subject, other):
            await one.remember_loop()
        refs = {
            "another process": subject.block(),
            "the same process": neighbour.call_block(other),
            "a hosted object": service.call(Blocking.block),
        }
        for begun in (subject.has_begun(), other.has_begun(), service.call(Blocking.has_begun)):
            await begun
        for ref in refs.values():
            ref.cancel()
        for where in ("another process", "a hosted object"):
            with pytest.raises(aiodaft.CallCancelled, match="it runs on, because a thread cannot be") as caught:
                await refs[where]
            assert caught.value.executed is None
        with pytest.raises(aiodaft.CallCancelled):
            await refs["the same process"]
        assert await neighbour.history() == ["cleaned up"]
        assert (await rt.info(other)).abandoned == 1


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("how", ["asyncio", "anyio"])
async def test_a_method_that_refuses_to_be_cancelled_is_given_up_after_the_grace_time(
    hasty_rt: aiodaft.Runtime, how: str
) -> None:
    rt, stubborn, other = hasty_rt, await hasty_rt.spawn(Subject), await hasty_rt.spawn(Subject)
    loop = asyncio.get_running_loop()
    began = loop.time()
    if how == "asyncio":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await stubborn.stubborn(other)
    else:
        with anyio.move_on_after(0.05):
            await stubborn.stubborn(other)
    assert loop.time() - began >= 0.1
    assert await stubborn.history() == ["began", "refused"]
    assert (await abandoned(rt, stubborn, 1)).running == ("Subject.stubborn",)
    # Its result is dropped: the bytes, and the value of the ref in it.
    await stubborn.let_go()
    await abandoned(rt, stubborn, 0)
    for actor in (stubborn, other):
        while (await rt.info(actor)).stored_bytes:
            pass


@pytest.mark.asyncio(loop_scope="function")
async def test_cleanup_that_takes_a_minute_is_given_the_grace_time(hasty_rt: aiodaft.Runtime) -> None:
    actor = await hasty_rt.spawn(Clinging)
    pid = await actor.pid()
    with listening() as ear:
        async with asyncio.timeout(30):
            await hasty_rt.stop(actor)
        assert not is_alive(pid)
        # Its process said so before it ended.
        await ear.hears("leaving Clinging-1 failed")


async def test_calls_that_outlive_their_deadline_or_their_caller_are_counted(rt: aiodaft.Runtime) -> None:
    stubborn, caller = await rt.spawn(Subject), await rt.spawn(Relay)
    ref = caller.call_stubborn(stubborn)
    await stubborn.has_begun()
    await rt.kill(caller)
    with pytest.raises(aiodaft.ActorDied):
        await ref
    await abandoned(rt, stubborn, 1)
    with pytest.raises(aiodaft.DeadlineExceeded):
        async with aiodaft.deadline(0.05):
            await stubborn.stubborn(None)
    # Both are over for their callers; the actor still runs them.
    assert (await abandoned(rt, stubborn, 2)).running == ("Subject.stubborn",) * 2
    await stubborn.let_go()
    await abandoned(rt, stubborn, 0)


async def test_a_second_cancellation_does_not_wait_for_the_cleanup(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    task = asyncio.get_running_loop().create_task(sleeper.stubborn(60).value())
    await sleeper.history()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(1):
        await asyncio.wait([task])
    assert task.cancelled()
    await rt.kill(sleeper)


async def test_cancelling_cascades_through_nested_calls(rt: aiodaft.Runtime) -> None:
    outer, middle, inner = await rt.spawn(Sleeper), await rt.spawn(Sleeper), await rt.spawn(Sleeper)
    task = asyncio.get_running_loop().create_task(outer.call(middle, 60).value())
    while "nested began" not in await middle.history():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert (await middle.history())[-1] == "nested cleaned up"
    assert await outer.history() == ["call cleaned up"]
    assert await inner.history() == []


async def test_cancelling_races_with_the_result_and_there_is_one_outcome(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    outcomes: set[str] = set()
    for ticks in range(500):
        # Every second result stays at its producer, and has to be freed there.
        ref = echo.echo(bytes(100_000) if ticks % 2 else ticks)
        task = asyncio.get_running_loop().create_task(ref.value())
        del ref
        for _ in range(ticks % 20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        outcomes.add("cancelled" if task.cancelled() else "done")
        del task
    assert "cancelled" in outcomes
    assert await echo.echo("still in order") == "still in order"
    assert not peer_of(rt).connections[next(iter(peer_of(rt).connections))].session.calls
    while (await rt.info(echo)).stored_bytes:
        pass
