"""Calls that wait for each other fail with the whole story; calls that only take long do not (tests A19 and A20)."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from actors import Box, Log
from deadlocked import RingPoller

import aiodaft
from aiodaft._runtime.diagnostics.await_chains import Wait, wait_of_task
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
        # What has not begun is nowhere yet.
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
        # What it is given later stands behind the row that needs its own result.
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
