"""Calls that wait for each other fail with the whole story; calls that only take long do not (tests A19 and A20)."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from actors import Box, Log
from deadlocked import RingPoller
from gang import Gang, Other

import aiodaft
from aiodaft._protocol.diagnostics.failures import CallAt
from aiodaft._protocol.groups.meeting import Coming
from aiodaft._protocol.groups.turns import STREAK
from aiodaft._protocol.ids import KEYED, ActorId, CallId, PeerId
from aiodaft._runtime.diagnostics.await_chains import Wait, wait_of_task
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.groups.meeting_place import MeetingPlace, target_of_member
from aiodaft.exceptions import WaitingCall

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def error_of(ref: aiodaft.Ref[Any]) -> aiodaft.DeadlockDetected:
    with pytest.raises((aiodaft.DeadlockDetected, ExceptionGroup)) as caught:
        await ref
    error = caught.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, aiodaft.DeadlockDetected)
    return error


def story(error: aiodaft.DeadlockDetected) -> list[tuple[str, str]]:
    """Class names do not differ, so a cycle is told by its actors and methods; each line must be the right one."""
    for one in error.cycle:
        assert isinstance(one, WaitingCall)
        name = one.method.partition(".")[2]
        # A call that has not begun is nowhere yet.
        assert re.fullmatch(rf".*deadlocked\.py:\d+ in ({name}|<listcomp>)|", one.line)
        assert f"{one.method} of {one.actor}" in str(error)
    return [(one.actor, one.method.partition(".")[2]) for one in error.cycle]


async def test_every_kind_of_cycle_is_found_and_names_its_calls(module_rt: aiodaft.Runtime) -> None:
    made = iter(await asyncio.gather(*(module_rt.spawn(RingPoller) for _ in range(20))))
    names: dict[Any, str] = {}

    async def waiters(count: int) -> list[Any]:
        found = [next(made) for _ in range(count)]
        names.update([(one, (await module_rt.info(one)).name) for one in found])
        return found

    expected: dict[aiodaft.Ref[Any], list[tuple[Any, str]]] = {}
    a, b = await waiters(2)
    expected[a.alone(b, a)] = [(a, "alone"), (b, "alone"), (a, "alone")]
    a, b, c = await waiters(3)
    expected[a.alone(b, c, a)] = [(a, "alone"), (b, "alone"), (c, "alone"), (a, "alone")]
    (a,) = await waiters(1)
    expected[a.alone(a)] = [(a, "alone"), (a, "alone")]
    for how in ("task group", "gather", "wait", "shield", "as_completed", "wait_for"):
        (a,) = await waiters(1)
        expected[a.fan_out(how, a)] = [(a, "fan_out"), (a, "fan_out")]
    a, b = await waiters(2)
    expected[a.consume(b, a)] = [(a, "consume"), (b, "items"), (a, "consume")]
    a, b = await waiters(2)
    await a.remember_loop()
    await b.remember_loop()
    expected[a.on_thread(b, a)] = [(a, "on_thread"), (b, "on_thread"), (a, "nothing")]
    (a,) = await waiters(1)
    await a.remember_loop()
    expected[a.on_thread(a)] = [(a, "on_thread"), (a, "nothing")]
    a, b = await waiters(2)
    helper = await module_rt.on(with_=a).spawn(RingPoller)
    names[helper] = (await module_rt.info(helper)).name
    expected[a.consume_before_making(helper, b)] = [(b, "free"), (helper, "ask_late"), (b, "free")]

    for ref, cycle in expected.items():
        error = await error_of(ref)
        assert story(error) == [(names[actor], name) for actor, name in cycle]
        # The one that failed had not begun.
        assert error.cycle[-1].line == ""


async def test_cycles_through_graphs_are_found_too(module_rt: aiodaft.Runtime) -> None:
    made = [await module_rt.spawn(RingPoller) for _ in range(8)]
    names = {actor: (await module_rt.info(actor)).name for actor in made}
    a, b, c, d, e, f, g, h = made
    for waiter in (c, d):
        await waiter.remember_loop()
    async with (
        aiodaft.compile(lambda: a.alone(b, a)) as on_loop,
        aiodaft.compile(lambda: c.on_thread(d, c)) as on_thread,
        aiodaft.compile(lambda: f.free(e.when_told())) as ahead,
    ):
        expected = {
            on_loop(): [(a, "alone"), (b, "alone"), (a, "alone")],
            on_thread(): [(c, "on_thread"), (d, "on_thread"), (c, "nothing")],
            g.in_a_graph(h, g): [(g, "in_a_graph"), (h, "in_a_graph"), (g, "in_a_graph")],
        }
        # Calls that it is given later stand behind the row that needs its own result.
        expected[ahead()] = [(e, "when_told"), (f, "free"), (f, "free")]
        behind = f.free()
        await e.keep(Box(behind))
        await e.open_gate()
        for ref, cycle in expected.items():
            error = await error_of(ref)
            assert sorted(story(error)) == sorted([(names[actor], name) for actor, name in cycle])
        await error_of(behind)


async def test_who_gets_the_error_may_go_on_and_so_may_the_others(module_rt: aiodaft.Runtime) -> None:
    a = await module_rt.spawn(RingPoller)
    first, behind = a.catching(a), a.catching()
    assert await first == "went on"
    assert await behind == "done"
    text, cycle, executed = await a.what_was_caught()
    assert "which is queued behind" in text
    assert len(cycle) == 2
    assert executed is False


async def test_a_call_that_may_still_get_a_place_is_left_alone(module_rt: aiodaft.Runtime) -> None:
    a = await module_rt.spawn(RingPoller)
    holder = a.two_at_a_time(wait=True)
    back = a.two_at_a_time(a)
    # Their process looks at both while it finds this one.
    neighbour = await module_rt.on(with_=a).spawn(RingPoller)
    assert await neighbour.catching(neighbour) == "went on"
    assert not back.done()
    await a.open_gate()
    assert await holder == "done"
    assert await back == "done"


async def test_two_calls_of_a_group_in_another_order_at_each_member_are_found(module_rt: aiodaft.Runtime) -> None:
    # Calls of other methods begin in one order.
    name = "step_in_any_order"
    group, other = await module_rt.group(2, Gang), await module_rt.spawn(Other)
    names = [(await module_rt.info(member)).name for member in group]
    # This one has begun at the first member, and waits for its argument at the second.
    first = group.each(getattr(Gang, name), [1, other.held(1)])
    second = other.drive(group, name, 10)
    await other.sent()
    await other.go()
    given: list[Any] = await asyncio.gather(first, second, return_exceptions=True)
    # One of the two goes on.
    assert [one for one in given if isinstance(one, list)] in ([[2, 2]], [[20, 20]])
    (error,) = (one for one in given if not isinstance(one, list))
    (deadlock,) = (one for one in error.exceptions if isinstance(one, aiodaft.DeadlockDetected))
    assert "waits in a collective for Gang." in str(deadlock)
    assert "let one of them make all calls whose methods meet in collectives" in str(deadlock)
    # Both calls at both members, where one of them has begun.
    assert sorted((one.actor, bool(one.line)) for one in deadlock.cycle) == [
        (name, has_begun) for name in sorted(names) for has_begun in (False, True)
    ]
    assert await group.all(getattr(Gang, name), 3) == [6, 6]


async def test_a_run_of_a_graph_and_a_call_of_a_group_that_stop_each_other_are_found(
    module_rt: aiodaft.Runtime,
) -> None:
    group, other = await module_rt.group(2, Gang), await module_rt.spawn(Other)

    def steps() -> Any:
        return group[0].step(1), group[1].step(other.held(1))

    # From now on, its calls begin when they come.
    assert await other.drive_often(group, "step", STREAK + 1) == (STREAK + 1) * 40
    async with aiodaft.compile(steps) as graph:
        run = graph()
        while not (await module_rt.info(group[0])).running:
            await asyncio.sleep(0)
        second = other.drive(group, "step", 10)
        await other.sent()
        await other.go()
        given: list[Any] = await asyncio.gather(asyncio.gather(*run), second, return_exceptions=True)
        assert [one for one in given if isinstance(one, list)] in ([[2, 2]], [[20, 20]])
        (error,) = (one for one in given if not isinstance(one, list))
        assert "waits in a collective for Gang.step" in str(getattr(error, "exceptions", [error])[0])
        assert await asyncio.gather(*graph()) == [2, 2]


async def test_a_member_that_awaits_another_one_in_a_collective_with_itself_is_found(
    module_rt: aiodaft.Runtime,
) -> None:
    group = await module_rt.group(2, Gang)
    with pytest.raises(ExceptionGroup) as caught:
        await group.all(Gang.step_after_asking)
    deadlock = next(one for one in caught.value.exceptions if isinstance(one, aiodaft.DeadlockDetected))
    assert [one.method for one in deadlock.cycle] == ["Gang.step_after_asking"] * 3
    assert "waits in a collective for" in str(deadlock)


async def test_a_wait_in_a_collective_is_for_those_that_have_not_come_unless_it_ends_after_a_while(
    module_rt: aiodaft.Runtime,
) -> None:
    first, second = map(target_of_member, await module_rt.group(2, Gang))

    def ask_gone(peer: PeerId, _: ActorId) -> aiodaft.Ref[None]:
        return second.caller.handle(peer, KEYED, "members", Keyed).gone(second.actor)

    waits: dict[tuple[float | None, bool], Wait] = {}
    for timeout, within in ((None, True), (3600, True), (None, False)):
        place = MeetingPlace(first.process, "g", 2, ask_gone)
        place.watch([first, second], but=0)
        coming = Coming("k", "k", 0, {}, within=("caller", 7) if within else None)
        task = asyncio.get_running_loop().create_task(place.come(coming, None, lambda brought: brought, timeout))
        await asyncio.sleep(0)
        waits[timeout, within] = wait_of_task(task)
        place.close(ValueError("over"))
        with pytest.raises(ValueError, match="over"):
            await task
    beside = CallAt(second.remote, PeerId("caller"), CallId(0), second.actor, (7,))
    assert waits.pop((None, True)).calls == [beside]
    # A member that comes by itself may be met by any call.
    assert [(wait.known, wait.calls) for wait in waits.values()] == [(False, []), (False, [])]


async def test_refs_of_each_other_in_running_calls(module_rt: aiodaft.Runtime) -> None:
    a, b = await module_rt.spawn(RingPoller), await module_rt.spawn(RingPoller)
    ones, others = a.when_told(), b.when_told()
    await a.keep(Box(others))
    await b.keep(Box(ones))
    # A task waits for them; otherwise nothing is searched.
    behind = a.when_told()
    await asyncio.gather(a.open_gate(), b.open_gate())
    error = await error_of(others)
    assert [(name, bool(one.line)) for one, (_, name) in zip(error.cycle, story(error), strict=True)] == [
        ("when_told", True),
        ("when_told", True),
    ]
    await error_of(ones)
    await error_of(behind)


async def test_as_completed_waits_for_its_calls_unless_it_comes_back_after_a_while(module_rt: aiodaft.Runtime) -> None:
    async def all_of(refs: list[aiodaft.Ref[Any]], timeout: float | None) -> None:
        for done in asyncio.as_completed(refs, timeout=timeout):
            await done

    waits: list[Wait] = []
    for timeout in (None, 3600):
        log = await module_rt.spawn(Log)
        task = asyncio.get_running_loop().create_task(all_of([log.after_gate(1), log.after_gate(2)], timeout))
        # It waits, and so does the task that it made for each ref.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waits.append(wait_of_task(task))
        await log.open_gate()
        await task
    assert [(wait.known, len(wait.calls)) for wait in waits] == [(True, 2), (False, 0)]
