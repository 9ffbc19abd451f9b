"""Actors spawn actors, and look up names, in the runtime that they are part of."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from inside import resources_of
from leaks import ended, is_alive
from log_ear import listening
from parents import Avenger, Child, Founder, Parent, pid_in, words_in

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_an_actor_spawns_actors_that_any_process_may_call(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    child = await parent.bear(6)
    assert await child.increment() == 7
    assert await child.ask(parent) == 42
    pids = {await parent.pid(), await child.pid(), os.getpid()}
    assert len(pids) == 3
    grandchild = await (await parent.bear_parent()).bear(9)
    assert await grandchild.increment() == 10
    assert await parent.sum_in_scope(3) == (6, pytest.approx([await child.pid()] * 3, abs=10_000))


@pytest.mark.parametrize(
    "restart", [None, aiodaft.Restart(), aiodaft.Restart(follow=False)], ids=["none", "follow", "stale"]
)
async def test_an_actor_gives_its_own_handle_to_others(rt: aiodaft.Runtime, restart: aiodaft.Restart | None) -> None:
    actor, other = await rt.on(restart=restart).spawn(Parent), await rt.spawn(Parent)
    me = await actor.me()
    assert (me, await me.me(), hash(me)) == (actor, actor, hash(actor))
    assert await actor.introduce(other) == 42
    assert await other.pids() == [await actor.pid()]
    if restart is None:
        return
    os.kill(await actor.pid(), signal.SIGKILL)
    if restart.follow:
        pid = await unless_dying(actor.pid)
        assert (await unless_dying(me.pid), await unless_dying(other.pids)) == (pid, [pid])
        return
    for call in (me.pid, other.pids):
        with pytest.raises(aiodaft.exceptions.StaleHandle):
            await unless_dying(call)


async def unless_dying(call: Callable[[], Any]) -> Any:
    """The result of a call, made again until the process that is being killed is known to be gone."""
    while True:
        with suppress(aiodaft.ActorDied):
            return await call()


async def test_only_an_actor_that_takes_calls_has_a_handle_of_its_own(rt: aiodaft.Runtime) -> None:
    class Early(aiodaft.Actor):
        def __init__(self) -> None:
            aiodaft.current_actor()

    class Hosted:
        async def me(self) -> object:
            return aiodaft.current_actor()

        async def size(self) -> int:
            return 3

    with pytest.raises(
        RuntimeError, match=r"^Early-\d+ is being made, and takes no calls yet: ask for its handle in a"
    ):
        await rt.spawn(Early)
    with pytest.raises(RuntimeError, match="is for the code of actors: none runs here"):
        aiodaft.current_actor()
    me: Any = await (await rt.spawn(Hosted)).call(Hosted.me)
    assert await me.call(Hosted.size) == 3


@pytest.mark.parametrize("ask", [asyncio.get_running_loop, asyncio.get_event_loop, aiodaft.current_runtime])
async def test_a_constructor_that_needs_the_loop_is_told_where_there_is_one(
    rt: aiodaft.Runtime, ask: Callable[[], object]
) -> None:
    class Asking(aiodaft.Actor):
        def __init__(self, early: Callable[[], object] | None = None) -> None:
            self.got = early and early()

        @aiodaft.method
        def ask(self, what: Callable[[], object]) -> None:
            what()

    with pytest.raises(RuntimeError) as told:
        await rt.spawn(Asking, ask)
    assert "`async def __aenter__" in f"{told.value}{told.value.__notes__}"
    with pytest.raises(RuntimeError) as told:
        await (await rt.spawn(Asking)).ask(ask)
    assert "`async def`" in f"{told.value}{told.value.__notes__}"


async def test_what_an_actor_has_spawned_ends_with_it(rt: aiodaft.Runtime) -> None:
    for end in ("stop", "kill", "accident"):
        parent = await rt.on(restart="temporary").spawn(Parent)
        elder = await parent.bear_parent()
        child, grandchild = await parent.bear(restart="permanent"), await elder.bear()
        pids = [await one.pid() for one in (child, elder, grandchild)]
        match end:
            case "stop":
                await rt.stop(parent)
                assert not any(map(is_alive, pids))
            case "kill":
                await rt.kill(parent)
            case _:
                os.kill(await parent.pid(), signal.SIGKILL)
        await ended(*pids)
        with pytest.raises(aiodaft.DaftError):
            await grandchild.increment()


async def test_the_end_of_a_scope_in_an_actor_ends_its_actors(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    total, pids = await parent.sum_in_scope(2)
    assert total == 4
    assert not any(map(is_alive, pids))


async def test_actors_of_one_process_end_each_with_its_parent(rt: aiodaft.Runtime) -> None:
    first = await rt.spawn(Parent)
    second = await rt.on(with_=first).spawn(Parent)
    one, two = await first.bear(), await second.bear()
    pid = await one.pid()
    await rt.stop(first)
    assert not is_alive(pid)
    assert await two.increment() == 1


async def test_an_actor_spawns_while_it_is_made_and_uses_that_while_it_ends(
    rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    async with rt.spawn(Founder, str(tmp_path / "notes")) as founder:
        pid = await founder.child_pid()
    assert words_in(tmp_path / "notes") == [str(pid), "1"]
    assert not is_alive(pid)
    with pytest.raises(ValueError, match="it cannot be made"):
        await rt.spawn(Founder, str(tmp_path / "others"), fails=True)
    assert not is_alive(await pid_in(tmp_path / "others"))


@pytest.mark.asyncio(loop_scope="function")
async def test_a_spawn_that_is_cancelled_or_loses_its_parent_leaves_nothing(
    own_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    for number, end in enumerate(("cancel", "stop", "kill")):
        parent = await own_rt.on(restart="temporary").spawn(Parent)
        gate, pid_file = tmp_path / f"gate{number}", tmp_path / f"pid{number}"
        os.mkfifo(gate)
        bearing = parent.bear_waiting(str(pid_file), str(gate))
        pid = await pid_in(pid_file)
        if end == "cancel":
            bearing.cancel()
        else:
            await (own_rt.stop if end == "stop" else own_rt.kill)(parent)
        with pytest.raises(aiodaft.DaftError):
            await bearing
        await ended(pid)
        if end == "cancel":
            assert await (await parent.bear(1)).increment() == 2


async def test_the_error_of_a_spawn_is_that_of_the_method(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    with pytest.raises(ValueError, match="cannot begin at -1"):
        await parent.bear(-1)
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match="needs gpus=9"):
        await parent.bear(gpus=9)


async def test_a_child_has_the_resources_that_it_asks_for_and_not_those_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    async with aiodaft.Runtime(cpus=8, gpus=4, share_gpus=True, preload=()) as rt:
        parent = await rt.on(cpus=1, gpus=1).spawn(Parent)
        child = await parent.bear(cpus=2, gpus=2)
        assert await child.threads() == "2"
        visible = await child.visible()
        assert visible is not None
        assert len(visible.split(",")) == 2
        _, free = await resources_of(rt)
        assert (free["cpus"], free["gpus"]) == (5, 1)
        await rt.stop(parent)
        _, free = await resources_of(rt)
        assert (free["cpus"], free["gpus"]) == (8, 4)


async def test_a_child_is_restarted_as_its_policy_says(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    child = await parent.bear(7, restart="permanent")
    assert await child.increment() == 8
    killed = await parent.kill_child()
    await ended(killed)
    while True:
        try:
            assert await child.increment() == 8
            break
        except aiodaft.ActorDied:
            await asyncio.sleep(0)
    assert (await parent.look_at(child)).restarts == 1


async def test_errors_that_no_code_sees_come_to_the_scope_of_the_parent() -> None:
    with pytest.raises(ExceptionGroup) as raised, listening() as ear:
        async with aiodaft.Runtime(preload=()) as rt:
            parent = await (await rt.spawn(Parent)).bear_parent()
            await parent.bear()
            await parent.drop_a_failure()
            await ear.hears("Child.fail failed, and its ref was dropped")
            await parent.kill_child()
            await ear.hears("an actor died while no call was under way")
    failed, died = raised.value.exceptions
    assert isinstance(failed, ValueError)
    assert isinstance(died, aiodaft.ActorDied)
    assert died.signal == "SIGKILL"


async def test_a_child_that_asks_its_waiting_parent_waits_its_turn_or_is_a_deadlock(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    await rt.name(parent, "parent")
    await parent.bear()
    # `async def` methods run beside each other.
    assert await parent.let_ask() == 42


async def test_an_actor_names_finds_stops_and_looks_at_actors(rt: aiodaft.Runtime) -> None:
    parent, mine = await rt.spawn(Parent), await rt.spawn(Child, 10)
    await rt.name(mine, "mine")
    theirs = await parent.bear()
    assert await parent.name_child("theirs") == ("mine", "theirs")
    assert await parent.find("mine") == 11
    assert await (await rt.lookup("theirs", Child)).increment() == 1
    info = await parent.look_at(theirs)
    assert (info.pid, info.names, info.alive) == (await theirs.pid(), ("theirs",), True)
    await parent.stop(theirs)
    with pytest.raises(aiodaft.NameNotFound):
        await rt.lookup("theirs", Child)
    # Also actors that others have spawned.
    await parent.stop(mine)
    assert not (await rt.info(mine)).alive


async def test_what_an_actor_stops_ends_although_that_one_dies_first(rt: aiodaft.Runtime) -> None:
    parent = await rt.on(restart="temporary").spawn(Parent)
    alone = await rt.on(name="alone").spawn(Avenger, await parent.pid())
    pid = await alone.pid()
    with pytest.raises(aiodaft.ActorDied):
        await parent.stop(alone)
    await ended(pid)

    parent, roommate = await rt.on(restart="temporary").spawn(Parent), await rt.spawn(Child)
    beside = await rt.on(name="beside", with_=roommate).spawn(Avenger, await parent.pid())
    with pytest.raises(aiodaft.ActorDied):
        await parent.stop(beside)
    # Its process goes on without it.
    while await rt.names():
        await asyncio.sleep(0.01)
    assert await roommate.increment() == 1


async def test_two_owners_do_not_share_a_process(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    child = await parent.bear()
    with pytest.raises(aiodaft.SpawnFailed, match="cannot share the process of Child-1, which was spawned elsewhere"):
        await rt.on(with_=child).spawn(Child)
    assert await (await parent.bear(4, with_=child)).pid() == await child.pid()


async def test_a_program_asks_for_its_runtime_too(rt: aiodaft.Runtime) -> None:
    assert aiodaft.current_runtime() is rt


async def test_where_there_is_no_runtime_the_error_says_so(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    with pytest.raises(RuntimeError, match="is for the event loop, and this is a thread"):
        await parent.runtime_in_a_thread()
    with pytest.raises(RuntimeError, match="open as long as the actor lives"):
        await parent.open_its_runtime()
    with pytest.raises(RuntimeError, match="ends with the actor"):
        await parent.close_its_runtime()
    assert await (await parent.bear_from_a_task()).increment() == 1


async def test_an_actor_stops_what_others_supervise_and_nothing_of_its_own_with_the_same_number(
    rt: aiodaft.Runtime,
) -> None:
    # Every owner begins with the same number.
    theirs = await rt.on(restart="permanent").spawn(Child)
    parent = await rt.spawn(Parent)
    elder = await parent.bear_parent()
    own = await elder.bear(restart="permanent")
    assert (await elder.look_at(theirs)).pid == await theirs.pid()
    await elder.stop(theirs)
    assert not (await rt.info(theirs)).alive
    assert await own.increment() == 1
    # The owner has not told this process where it is, and never will.
    await elder.stop(theirs)
    assert await elder.answer() == 42
    assert not (await elder.look_at(theirs)).alive
