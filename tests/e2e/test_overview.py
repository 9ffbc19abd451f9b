"""`rt.overview()`: one look at nodes, processes, actors, their traffic and stored values, and failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from overseen import Gate, Middle, Source, Unmade
from parents import Parent

import aiodaft
from aiodaft.overview import Failure, Flow, Overview

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 4 << 20


def named(overview: Overview, name: str) -> aiodaft.state.ActorInfo:
    return next(actor for actor in overview.actors if actor.name == name)


def flow(overview: Overview, source: str, target: str) -> Flow:
    return next(flow for flow in overview.flows if (flow.source, flow.target) == (source, target))


def told(failure: Failure) -> object:
    """The place and the error of a failure, and the failures that followed."""
    where = failure.method or failure.actor
    return (where, failure.causes[-1].type, *map(told, failure.followed))


async def test_it_shows_what_every_process_and_actor_does(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    source = await rt.on(name="the-source", restart=aiodaft.Restart()).spawn(Source)
    middle = await rt.spawn(Middle, source)
    infos = {type_: await rt.info(actor) for type_, actor in {"source": source, "middle": middle}.items()}
    waiting = source.wait()
    before = await rt.overview()
    await middle.ask(5)
    with pytest.raises(ValueError, match="bad"):
        await source.fail("bad")
    after = await rt.overview()
    waiting.cancel()

    controller, *workers = after.processes
    assert (controller.role, controller.title, controller.pid) == ("controller", "the controller", os.getpid())
    assert {process.title for process in workers} == {info.name for info in infos.values()}
    assert all(process.answered and process.rss > 1 << 20 and process.cpu_seconds > 0 for process in after.processes)
    assert {process.owner for process in after.processes} == {after.runtime} == {controller.id}
    assert after.silent == ()
    assert repr(after) == f"<Overview of {controller.id}: 1 node, 3 processes, 2 actors, 1 failure>"
    assert [(node.state, node.actors) for node in after.nodes] == [("ready", 2)]

    one, other = (named(after, infos[name].name) for name in ("source", "middle"))
    assert (one.state, one.running, one.names, one.class_name) == ("busy", ("Source.wait",), ("the-source",), "Source")
    assert (one.done, one.failed, one.pid) == (6, 1, infos["source"].pid)
    assert (other.state, other.done, other.failed, other.names) == ("idle", 1, 0, ())

    # Calls are counted by the process that makes them, without those of the runtime itself.
    asked = flow(after, other.process, one.process)
    assert asked.calls == 5
    assert asked.bytes == asked.control_bytes > 0
    assert flow(after, controller.id, one.process).calls == 1
    rates = after.rates(before)
    assert rates.actors[one.name].calls * rates.seconds == pytest.approx(6)
    assert rates.flows[other.process, one.process].calls * rates.seconds == pytest.approx(5)
    assert rates.calls * rates.seconds == pytest.approx(7)


async def test_it_shows_values_and_where_their_bytes_go(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    source, taker = await rt.spawn(Source), await rt.spawn(Source)
    made, put = source.make(SIZE), rt.put(bytes(2 * SIZE))
    await asyncio.gather(made.ready(), put.ready())
    assert await taker.take(made) == SIZE
    assert await taker.take(put) == 2 * SIZE
    overview = await rt.overview()
    here, there, target = overview.runtime, (await rt.info(source)).process, (await rt.info(taker)).process
    largest, second = overview.stored
    assert (largest.label, largest.process, largest.owner) == ("put", here, here)
    assert (second.label, second.process, second.owner) == ("Source.make", there, here)
    assert (largest.nbytes, second.nbytes) == (pytest.approx(2 * SIZE, abs=200), pytest.approx(SIZE, abs=200))
    assert flow(overview, there, target).payload_bytes == pytest.approx(SIZE, abs=200)
    assert flow(overview, here, target).payload_bytes == pytest.approx(2 * SIZE, abs=200)
    info = next(process for process in overview.processes if process.id == there)
    assert (info.stored_values, info.stored_bytes, info.blocks) == (1, second.nbytes, 1)
    del made, put
    while (overview := await rt.overview()).stored:
        pass
    info = next(process for process in overview.processes if process.id == there)
    # Its memory is kept for the next values.
    assert (info.stored_values, info.stored_bytes, info.blocks) == (0, 0, 0)
    assert info.pooled_bytes >= SIZE


async def test_failures_come_with_their_cause_first(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    source = await rt.spawn(Source)
    middle = await rt.spawn(Middle, source)
    gate = await rt.spawn(Gate, middle)
    for _ in range(3):
        with pytest.raises(ValueError, match="an argument"):
            await middle.pass_on("an argument")
    with pytest.raises(RuntimeError, match="no way"):
        await gate.enter("another")
    with pytest.raises(OSError, match="no disk"):
        await rt.spawn(Unmade)
    killer = await rt.spawn(Middle, await rt.spawn(Source))
    with pytest.raises(aiodaft.ActorDied):
        await killer.kill()
    overview = await rt.overview()
    death, start, wrapped, passed = overview.failures[:4]
    assert told(passed) == ("Source.fail", "ValueError", ("Middle.pass_on", "ValueError"))
    assert (passed.times, passed.followed[0].times, passed.error) == (3, 3, "ValueError: an argument")
    assert passed.line.startswith("overseen.py:")
    assert told(wrapped) == (
        "Source.fail", "ValueError", ("Middle.wrap", "RuntimeError", ("Gate.enter", "RuntimeError")),
    )  # fmt: skip
    assert (start.what, start.error) == ("start", "OSError: no disk")
    assert (death.what, death.causes[0].type, [told(one) for one in death.followed]) == (
        "death", "ActorDied", [("Middle.kill", "ActorDied")],
    )  # fmt: skip
    assert abs(overview.taken - death.last) < 20


async def test_calls_that_are_cancelled_or_late_did_not_fail(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    source = await rt.spawn(Source)
    waiting = source.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await waiting
    with pytest.raises(aiodaft.DeadlineExceeded):
        async with aiodaft.deadline(0.01):
            await source.wait()
    info = named(await rt.overview(), (await rt.info(source)).name)
    assert (info.done, info.failed) == (2, 0)


async def test_a_process_that_does_not_answer_is_marked_and_not_waited_for(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    source, other = await rt.on(name="stopped").spawn(Source), await rt.spawn(Source)
    info = await rt.info(source)
    os.kill(info.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            overview = await rt.overview(patience=0.2)
    finally:
        os.kill(info.pid, signal.SIGCONT)
    assert [process.pid for process in overview.silent] == [info.pid]
    stopped = named(overview, info.name)
    assert (stopped.state, stopped.names, stopped.pid, stopped.done) == ("silent", ("stopped",), info.pid, 0)
    assert named(overview, (await rt.info(other)).name).state == "idle"
    assert overview.rates(overview).processes.keys() == {overview.runtime, (await rt.info(other)).process}
    assert (await rt.overview(patience=20)).silent == ()


async def test_an_actor_that_is_restarted_is_there_without_a_process(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    again = aiodaft.Restart(backoff=aiodaft.Backoff(base=4, jitter=0))
    source = await rt.on(restart=again, name="comes-back").spawn(Source)
    name = (await rt.info(source)).name
    with pytest.raises(aiodaft.ActorDied):
        await source.die()
    while (overview := await rt.overview()) and named(overview, name).state != "restarting":
        pass
    actor = named(overview, name)
    assert (actor.pid, actor.process, actor.class_name, actor.names) == (None, "", "Source", ("comes-back",))
    assert isinstance(actor.last_error, aiodaft.ActorDied)
    assert (await rt.info(source)).state == "restarting"
    plain = json.loads(overview.to_json())
    assert plain == overview.as_dict()
    found = next(one for one in plain["actors"] if one["name"] == name)
    assert (found["state"], found["last_error"]["type"]) == ("restarting", "ActorDied")
    assert plain["processes"][0]["title"] == "the controller"


async def test_actors_that_died_for_good_are_there_until_they_are_stopped(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    given_up = await rt.on(restart=aiodaft.Restart(intensity=0), name="given-up").spawn(Source)
    plain, group = await rt.spawn(Source), await rt.on(restart="temporary").group(2, Source)
    # Its death is no failure, and leaves no place in a group empty.
    guest = await rt.on(restart="temporary").spawn(Source)
    missed = {(await rt.info(actor)).name: actor for actor in (given_up, plain, group[1])}
    names = [(await rt.info(group[0])).name, *missed]
    for actor in (guest, *missed.values()):
        with pytest.raises(aiodaft.ActorDied):
            await actor.die()
    while len((overview := await rt.overview()).processes) > 2:
        pass
    assert {actor.name: actor.state for actor in overview.actors} == dict.fromkeys(names, "dead") | {names[0]: "idle"}
    for name, actor in missed.items():
        found, info = named(overview, name), await rt.info(actor)
        assert (found.pid, found.process, found.class_name, found.alive) == (None, "", "Source", False)
        expected = aiodaft.exceptions.RestartLimitReached if actor is given_up else aiodaft.ActorDied
        assert [type(one.last_error) for one in (found, info)] == [expected] * 2
        assert info.state == "dead"
        await rt.stop(actor)
    assert [actor.name for actor in (await rt.overview()).actors] == names[:1]


async def test_the_dead_of_a_scope_are_there_until_its_end(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    async with rt.scope() as scope:
        group = await scope.on(restart="temporary").group(1, Source)
        with pytest.raises(aiodaft.ActorDied):
            await group[0].die()
        while [actor.state for actor in (await rt.overview()).actors] != ["dead"]:
            pass
    assert (await rt.overview()).actors == ()


async def test_actors_of_actors_are_there_with_their_restarts(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    parent = await rt.spawn(Parent)
    child = await parent.bear(restart=aiodaft.Restart())
    await parent.kill_child()
    while (await parent.look_at(child)).restarts == 0:
        pass
    overview = await rt.overview()
    elder, younger = named(overview, (await rt.info(parent)).name), named(overview, "Child-1")
    assert (younger.restarts, younger.epoch, younger.class_name) == (1, 1, "Child")
    assert isinstance(younger.last_error, aiodaft.ActorDied)
    assert next(one.owner for one in overview.processes if one.id == younger.process) == elder.process
