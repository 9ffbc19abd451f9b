"""Names, looking at actors, and ending them; services and values of the controller (rows CR1, CR7, CR8)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from actors import Echo, Entered, Log, NeedsGpu, Plain, Relay, Sleeper
from inside import controller_of, peer_of
from leaks import is_alive
from parents import Child, Parent, Waiting, words_in
from probes import Derived, Half, HalfChild, Kind, Member, Probe

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_a_named_actor_is_found_and_is_the_same(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    await rt.name(echo, "the.echo-1_x")
    found = await rt.lookup("the.echo-1_x", Echo)
    assert found == echo
    assert await found.echo(1) == 1
    assert await (await rt.spawn(Relay)).call_other(found, 2) == 2


async def test_a_missing_name_is_an_error_at_once_that_lists_the_others(rt: aiodaft.Runtime) -> None:
    with pytest.raises(aiodaft.NameNotFound, match="no actor is named 'router'; names in use: none"):
        await rt.lookup("router", Echo)
    await rt.name(await rt.spawn(Echo), "beta")
    await rt.name(await rt.spawn(Echo), "alpha")
    with pytest.raises(LookupError, match="names in use: alpha, beta") as caught:
        await rt.lookup("router", Echo)
    assert isinstance(caught.value, aiodaft.DaftError)
    assert caught.value.executed is False


async def test_names_are_listed_by_what_they_begin_with(rt: aiodaft.Runtime) -> None:
    assert await rt.names() == ()
    echo = await rt.spawn(Echo)
    for name in ("b.2", "a", "b.1"):
        await rt.name(echo, name)
    assert await rt.names() == ("a", "b.1", "b.2")
    assert await rt.names("b.") == ("b.1", "b.2")
    with pytest.raises(ValueError, match="no actor's name begins with 'b/'"):
        await rt.names("b/")
    await rt.stop(echo)
    assert await rt.names() == ()


async def test_names_are_told_as_they_come_and_go(rt: aiodaft.Runtime) -> None:
    names = rt.watch("w.")
    assert await anext(names) == ()
    first, second = await rt.spawn(Echo), await rt.spawn(Echo)
    await rt.name(first, "other")
    await rt.name(first, "w.1")
    assert await anext(names) == ("w.1",)
    await rt.name(second, "w.2")
    assert await anext(names) == ("w.1", "w.2")
    # What changes between two looks is told together.
    await rt.stop(first)
    await rt.name(await rt.spawn(Echo), "w.1")
    seen = await anext(names)
    while seen != ("w.1", "w.2"):
        seen = await anext(names)
    os.kill((await rt.info(second)).pid, signal.SIGKILL)
    assert await anext(names) == ("w.1",)
    with pytest.raises(ValueError, match="no actor's name begins with 'b/'"):
        rt.watch("b/")
    await names.aclose()


async def test_a_handle_of_a_base_class_calls_the_methods_of_the_actor_from_any_process(rt: aiodaft.Runtime) -> None:
    derived = await rt.spawn(Derived)
    await rt.name(derived, "derived")
    base = await rt.lookup("derived", Kind)
    beside, apart = await rt.on(with_=derived).spawn(Kind), await rt.spawn(Kind)
    assert [await base.kind(), await beside.kind_of(base), await apart.kind_of(base)] == ["derived"] * 3


async def test_a_lookup_checks_the_class_and_takes_bases(rt: aiodaft.Runtime) -> None:
    await rt.name(await rt.on(cpus=0, gpus=0, resources={}).spawn(HalfChild), "child")
    assert "HalfChild-" in repr(await rt.lookup("child", HalfChild))
    assert await (await rt.lookup("child", Half)).visible() == os.environ.get("CUDA_VISIBLE_DEVICES")
    with pytest.raises(TypeError, match=r"'child' is HalfChild-\d+, which is no Echo"):
        await rt.lookup("child", Echo)
    await rt.name(await rt.on(cpus=0, gpus=0, resources={}).spawn(Half), "base")
    with pytest.raises(TypeError, match=r"'base' is Half-\d+, which is no HalfChild"):
        await rt.lookup("base", HalfChild)


async def test_a_name_belongs_to_one_actor_and_an_actor_may_have_several(rt: aiodaft.Runtime) -> None:
    first, second = await rt.spawn(Echo), await rt.spawn(Echo)
    await rt.name(first, "a")
    await rt.name(first, "a")
    await rt.name(first, "b")
    with pytest.raises(aiodaft.exceptions.NameTaken, match=r"the name 'a' belongs to Echo-\d+") as caught:
        await rt.name(second, "a")
    assert caught.value.executed is False
    assert (await rt.info(first)).names == ("a", "b")
    assert (await rt.info(second)).names == ()


@pytest.mark.parametrize("name", ["", ".hidden", "a b", "a/b", "ä", "x" * 256, "a\nb", None, 3])
async def test_what_cannot_be_a_name_is_refused_at_once(rt: aiodaft.Runtime, name: Any) -> None:
    echo = await rt.spawn(Echo)
    before = rt.traffic()
    with pytest.raises(ValueError, match="cannot name an actor"):
        await rt.name(echo, name)
    with pytest.raises(ValueError, match="cannot name an actor"):
        await rt.lookup(name, Echo)
    assert rt.traffic() == before


async def test_what_is_no_handle_cannot_be_named_stopped_or_looked_at(rt: aiodaft.Runtime) -> None:
    for action in (lambda: rt.name("echo", "x"), lambda: rt.stop(3), lambda: rt.kill(None), lambda: rt.info(Echo)):
        with pytest.raises(TypeError, match="expected an actor's handle, got"):
            await action()


@pytest.mark.parametrize("how", ["stop", "kill", "sigkill", "kill the neighbour", "leave"])
async def test_a_name_is_free_again_when_its_actor_is_gone(rt: aiodaft.Runtime, how: str) -> None:
    async with rt.scope() as scope:
        neighbour = await scope.spawn(Echo)
        old = await scope.on(with_=neighbour).spawn(Sleeper)
        await rt.name(old, "router")
        if how == "stop":
            await scope.stop(old)
        elif how == "kill":
            await scope.kill(old)
        elif how == "kill the neighbour":
            await scope.kill(neighbour)
        elif how == "sigkill":
            ref = old.sleep(60)
            await old.history()
            os.kill((await rt.info(old)).pid, signal.SIGKILL)
            with pytest.raises(aiodaft.ActorDied):
                await ref
        if how != "leave":
            with pytest.raises(aiodaft.NameNotFound):
                await rt.lookup("router", Sleeper)
    new = await rt.spawn(Sleeper)
    await rt.name(new, "router")
    assert await rt.lookup("router", Sleeper) == new


async def test_naming_an_actor_that_is_gone_is_refused(rt: aiodaft.Runtime) -> None:
    echo, sleeper = await rt.spawn(Echo), await rt.spawn(Sleeper)
    await rt.stop(echo)
    await rt.kill(sleeper)
    for gone in (echo, sleeper):
        with pytest.raises(aiodaft.ActorDied):
            await rt.name(gone, "ghost")
    with pytest.raises(aiodaft.NameNotFound):
        await rt.lookup("ghost", Echo)


async def test_of_many_that_want_an_actor_with_a_name_one_makes_it(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    wanted = [rt.get_or_create("one", Child, 5) for _ in range(10)]
    *made, theirs = await asyncio.gather(*wanted, parent.get_or_create("one", 7))
    assert len({await child.pid() for child in (*made, theirs)}) == 1
    assert await theirs.increment() in {6, 8}
    with pytest.raises(TypeError, match="which is no Parent"):
        await rt.get_or_create("one", Parent)
    with pytest.raises(ValueError, match="cannot name an actor"):
        await rt.get_or_create("a/b", Child)
    supervised = await rt.on(restart="permanent").get_or_create("two", Child, 1)
    assert await (await parent.get_or_create("two", 7)).increment() == 2
    assert await supervised.increment() == 3


async def test_an_actor_is_spawned_with_a_name_or_not_at_all(rt: aiodaft.Runtime) -> None:
    async with rt.on(name="router").spawn(Child) as router:
        assert await rt.lookup("router", Child) == router
        with pytest.raises(aiodaft.exceptions.NameTaken, match=r"'router' belongs to Child-\d+"):
            await rt.on(name="router").spawn(Child)
        assert (await rt.info(router)).names == ("router",)
    assert await rt.names() == ()
    for wrong in ({"name": "a/b"}, {"lifetime": "forever"}):
        with pytest.raises(ValueError, match='cannot name an actor|is not "cluster"'):
            rt.on(**wrong)
    with pytest.raises(ValueError, match="is for one actor, not for a group"):
        rt.on(name="router").group(2, Child)
    with pytest.raises(ValueError, match="there is no cluster, only this program"):
        await rt.on(name="router", lifetime="cluster").spawn(Child)


async def test_a_name_is_free_again_when_its_actor_could_not_be_made(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot begin at -1"):
        await rt.get_or_create("one", Child, -1)
    gate, pid_file = tmp_path / "gate", tmp_path / "pid"
    os.mkfifo(gate)
    async with asyncio.TaskGroup() as tasks:
        making = tasks.create_task(rt.get_or_create("one", Waiting, str(pid_file), str(gate)))
        while not (words := words_in(pid_file)):
            await asyncio.sleep(0.01)
        # It waits for the one that makes it.
        waiting = tasks.create_task(rt.get_or_create("one", Child, 3))
        given_up = tasks.create_task(rt.get_or_create("one", Child, 4))
        await asyncio.sleep(0)
        given_up.cancel()
        making.cancel()
    assert await waiting.result().increment() == 4
    assert not is_alive(int(words[0]))


async def test_the_coordinator_takes_no_part_in_calls(rt: aiodaft.Runtime) -> None:
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    assert await relay.call_other(echo, 0) == 0
    hosted = next(hosted for hosted in peer_of(rt).actors.values() if hosted.name == "coordinator")
    before = hosted.done
    await asyncio.gather(*(relay.call_other(echo, index) for index in range(1000)))
    assert hosted.done == before


async def test_info_names_the_first_of_very_many_calls(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    refs = [log.after_gate(number) for number in range(103)]
    await log.all()
    info = await rt.info(log)
    assert (info.running, info.running_besides) == (("Log.after_gate",) * 100, 3)
    await log.open_gate()
    await asyncio.gather(*refs)


@pytest.mark.asyncio(loop_scope="function")
async def test_info_says_how_an_actor_is_doing(own_rt: aiodaft.Runtime) -> None:
    sleeper = await own_rt.on(gpus=2).spawn(Sleeper)
    info = await own_rt.info(sleeper)
    assert (info.name, info.class_name, info.names, info.gpus, info.node, info.alive) == (
        "Sleeper-1", "Sleeper", (), (0, 1), controller_of(own_rt).options.process.node, True,
    )  # fmt: skip
    assert is_alive(info.pid)
    assert (info.running, info.queued, info.done, info.stored_bytes) == ((), 0, 0, 0)
    running = sleeper.block(20)
    await sleeper.history()
    queued = [sleeper.block(0) for _ in range(2)]
    info = await own_rt.info(sleeper)
    assert info.running == ("Sleeper.block",)
    assert (info.queued, info.done) == (2, 1)
    await sleeper.unblock()
    assert await asyncio.gather(running, *queued) == ["unblocked"] * 3
    info = await own_rt.info(sleeper)
    assert (info.running, info.queued, info.done) == ((), 0, 5)


@pytest.mark.asyncio(loop_scope="function")
async def test_info_of_the_dead(own_rt: aiodaft.Runtime) -> None:
    host = await own_rt.spawn(Probe)
    guest = await own_rt.on(with_=host).spawn(Probe)
    await own_rt.stop(guest)
    info = await own_rt.info(guest)
    assert (info.name, info.alive) == ("Probe-2", False)
    assert (await own_rt.info(host)).alive
    await own_rt.kill(host)
    info = await own_rt.info(host)
    assert (info.name, info.alive, info.pid, info.gpus, info.names) == ("Probe-1", False, None, (), ())


async def test_stopping_lets_calls_under_way_end_and_says_so_to_the_others(tmp_path: Path) -> None:
    async with aiodaft.Runtime(preload=(), stop_grace=1.0, cancel_grace=0.1) as rt:
        sleeper = await rt.spawn(Sleeper)
        entered = await rt.on(with_=sleeper).spawn(Entered, str(tmp_path / "left"))
        running, looped = sleeper.block(20), sleeper.sleep(0.3)
        await sleeper.history()
        queued = sleeper.block(20)
        stopping = asyncio.get_running_loop().create_task(rt.stop(sleeper))
        with pytest.raises(aiodaft.ActorDied, match="Sleeper-1 was stopped: stopped by its owner") as caught:
            while True:
                await sleeper.time_left()
        assert caught.value.executed is False
        assert await looped == "sleep"
        assert not stopping.done()
        await stopping
        for ref, executed in ((queued, False), (running, None)):
            with pytest.raises(aiodaft.ActorDied, match="Sleeper-1 was stopped") as caught:
                await ref
            assert caught.value.executed is executed
        assert not (tmp_path / "left").exists()
        assert await entered.is_entered()
        await rt.stop(entered)
        assert (tmp_path / "left").read_text() == "left\n"


async def test_two_stops_of_one_actor_both_end_when_it_has(rt: aiodaft.Runtime) -> None:
    member = await rt.spawn(Member)
    pid, ref = await member.pid(), member.held("x")
    await member.history()
    both = asyncio.gather(rt.stop(member), rt.stop(member))
    await asyncio.sleep(0)
    ref.cancel()
    await both
    assert not is_alive(pid)
    with pytest.raises(aiodaft.CallCancelled):
        await ref


async def test_a_stop_that_is_cancelled_kills(rt: aiodaft.Runtime) -> None:
    member = await rt.spawn(Member)
    pid, ref = await member.pid(), member.held("x")
    await member.history()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await rt.stop(member)
    assert not is_alive(pid)
    with pytest.raises((aiodaft.ActorDied, aiodaft.CallCancelled)):
        await ref


async def test_killing_does_not_wait_and_frees_everything(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.on(gpus=4).spawn(Sleeper)
    pid = (await rt.info(sleeper)).pid
    refs = [sleeper.stubborn(60), sleeper.block(60)]
    await sleeper.history()
    async with asyncio.timeout(5):
        await rt.kill(sleeper)
        for ref in refs:
            with pytest.raises(aiodaft.ActorDied, match="was stopped: killed by its owner") as caught:
                await ref
            assert caught.value.executed is None
    assert not is_alive(pid)
    assert await (await rt.spawn(NeedsGpu)).visible() == "0"
    # The block goes on: this death was wanted.
    assert await (await rt.spawn(Sleeper)).sleep(0.3) == "sleep"


async def test_an_actor_in_a_frozen_process_is_ended_after_the_grace_time() -> None:
    async with asyncio.timeout(30):
        async with aiodaft.Runtime(preload=(), stop_grace=0.1, cancel_grace=0.1) as rt:
            stopped, left = await rt.spawn(Probe), await rt.spawn(Probe)
            pids = [await stopped.pid(), await left.pid()]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await rt.stop(stopped)
            assert [is_alive(pid) for pid in pids] == [False, True]
        assert not is_alive(pids[1])


async def test_a_service_is_stopped_named_and_passed_on_like_an_actor(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    async with rt.on(gpus=1).spawn(Plain, 10) as service:
        assert repr(service) == "<Service of Plain>"
        info = await rt.info(service)
        assert (info.name, info.class_name, info.gpus, info.alive) == ("Plain-1", "Plain", (0,), True)
        await rt.name(service, "plain")
        assert (await rt.info(service)).names == ("plain",)
        assert await (await rt.lookup("plain", Plain)).call(Plain.add, 6) == 16
        travelled: Any = await echo.echo(service)
        assert await travelled.call(Plain.add, 5) == 15
        neighbour = await rt.on(with_=service).spawn(Probe)
        assert await neighbour.pid() == info.pid
        await rt.stop(neighbour)
        ref = service.call(Plain.add, 1)
        with pytest.raises(TypeError, match=r"Plain.add\(self, value: .*: missing a required argument: 'value'"):
            service.call(Plain.add)  # type: ignore[call-overload]  # the mistake under test
    assert await ref == 11
    assert not is_alive(info.pid)
    with pytest.raises(aiodaft.ActorDied):
        await service.call(Plain.add, 1)


async def test_services_of_classes_that_were_not_written_for_actors(rt: aiodaft.Runtime) -> None:
    import collections
    import fractions

    counter = await rt.spawn(collections.Counter, "abca")
    await counter.call(collections.Counter.update, "aa")
    assert await counter.call(collections.Counter.most_common, 1) == [("a", 4)]
    half = await rt.spawn(fractions.Fraction, 1, 2)
    assert await half.call(fractions.Fraction.limit_denominator, 10) == fractions.Fraction(1, 2)
    listed = await rt.spawn(list, [3, 1, 2])
    await listed.call(list.sort)
    assert await listed.call(list.pop) == 3
    assert await listed.call(list.__len__) == 2
    with pytest.raises(IndexError, match="pop index out of range"):
        await listed.call(list.pop, 7)


async def test_a_value_that_was_put_is_encoded_once_and_shared(rt: aiodaft.Runtime) -> None:
    actors = await rt.group(3, Echo)
    value = {"weights": bytes(2_000_000), "n": 1}
    ref = rt.put(value)
    await ref.ready()
    assert "put" in repr(ref)
    assert await ref is value
    assert [got == value for got in await actors.all(Echo.echo, ref)] == [True] * 3
    assert await actors[0].echo({"nested": [ref]}) == {"nested": [value]}
    ref.free()
    with pytest.raises(ReferenceError):
        await ref


async def test_what_cannot_travel_is_found_out_when_a_put_value_is_used(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    with pytest.raises(aiodaft.exceptions.SerializationError, match="cannot travel"):
        await echo.echo(rt.put({"loop": asyncio.get_running_loop()}))
    assert await echo.echo(rt.put("fine")) == "fine"
