"""The edges of a runtime: before and after it, beside it, inside it, other threads, and strangers on its links."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from dataclasses import dataclass

import pytest
from actors import Echo, Log, Relay, Sleeper, Streamer
from inside import awaited, controller_of, fork_server_of, launcher_of, resources_of
from leaks import ended, is_alive
from probes import Probe

import aiodaft
from aiodaft._protocol.connections.codec import FrameEncoder
from aiodaft._protocol.connections.messages import CALL, INTRODUCE, NOTE, REPLY, Message

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


GARBAGE = {
    "no frame": b"\xc1" * 64,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "a frame without end": b"\xdd\xff\xff\xff\xff",
}


@dataclass
class Holder:
    """Something ordinary with a ref in it."""

    content: object


def frame(message: Message) -> bytes:
    """A message as it goes over a link."""
    encoder = FrameEncoder()
    encoder.pack(message)
    return encoder.take()


FORGED = {
    "an unknown kind": frame((99, 1)),
    "wrong fields": frame((CALL, "one", 2, 3)),
    "an answer to nothing": frame((REPLY, 10**6, "surprise")),
    "a note of no transport": frame((NOTE, "pigeon", b"", 0)),
    "a descriptor that does not come": frame((INTRODUCE, "worker-0")),
}


@pytest.mark.parametrize("data", [*GARBAGE.values(), *FORGED.values()], ids=[*GARBAGE, *FORGED])
async def test_a_worker_that_talks_nonsense_is_cut_off_and_the_others_go_on(rt: aiodaft.Runtime, data: bytes) -> None:
    mad, echo = await rt.spawn(Probe), await rt.spawn(Echo)
    pid = await mad.pid()
    waiting = echo.echo(mad.echo(mad.spoil_link(data, "home")))
    with pytest.raises(aiodaft.DaftError) as caught:
        await mad.spoil_link(data, "home")
    assert isinstance(caught.value, aiodaft.exceptions.RemoteProtocolError)
    with pytest.raises(aiodaft.DaftError):
        await waiting
    with pytest.raises(aiodaft.DaftError) as after:
        await mad.pid()
    assert after.value.executed is False
    await ended(pid)
    # The callers have been told, so that the block goes on, also once the dead have been counted.
    assert await (await rt.spawn(Sleeper)).sleep(0.3) == "sleep"
    assert await echo.echo("goes on") == "goes on"
    assert await (await rt.spawn(Echo)).echo("and grows") == "and grows"
    await rt.stop(mad)


@pytest.mark.parametrize("data", [GARBAGE["no frame"], FORGED["an answer to nothing"]], ids=["garbage", "forged"])
async def test_nonsense_between_two_workers_harms_neither_of_them(rt: aiodaft.Runtime, data: bytes) -> None:
    mad, victim = await rt.spawn(Probe), await rt.spawn(Probe)
    assert await mad.call(victim, 1) == 1
    spoiling = mad.spoil_link(data, "other")
    with pytest.raises(aiodaft.DaftError):
        await mad.call(victim, 2)
    spoiling.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await spoiling
    assert await victim.echo("untouched") == "untouched"
    assert await mad.echo("still there") == "still there"


async def test_a_stream_and_a_channel_that_the_runtime_leaves_behind_end() -> None:
    async with aiodaft.Runtime(preload=(), stop_grace=0.1) as rt:
        stream = (await rt.spawn(Streamer)).numbers(10**6)
        assert await anext(stream) == 0
        log = await rt.spawn(Log)
        channel: aiodaft.Channel[int] = aiodaft.Channel(1)
        receiving = asyncio.get_running_loop().create_task(channel.recv())
        ref = log.after_gate("never")
        await log.all()
    async with asyncio.timeout(30):
        with pytest.raises(aiodaft.DaftError):
            async for _ in stream:
                pass
        with pytest.raises(aiodaft.DaftError):
            await receiving
        with pytest.raises((aiodaft.CallCancelled, aiodaft.ActorDied)):
            await ref


async def test_a_stopped_actor_that_is_passed_on_is_reported_where_it_is_called(rt: aiodaft.Runtime) -> None:
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    await rt.stop(echo)
    with pytest.raises(aiodaft.ActorDied, match=r"Echo-\d+ .*was stopped"):
        await relay.call_other(echo, 1)


async def test_a_thread_may_call_and_the_loop_awaits(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    refs = await asyncio.to_thread(lambda: [echo.echo(index) for index in range(100)])
    assert await asyncio.gather(*refs) == list(range(100))
    with pytest.raises(aiodaft.exceptions.SerializationError, match=r"args\[0\] of Echo.echo cannot travel"):
        await asyncio.to_thread(lambda: echo.echo(threading.Lock()))


async def test_another_loop_is_told_apart(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    ref = log.after_gate("mine")

    async def await_ref() -> None:
        await ref

    async def spawn() -> None:
        await rt.spawn(Echo)

    async def put() -> None:
        rt.put(1)

    async def stop() -> None:
        await rt.stop(log)

    for mistake in (await_ref, spawn, put, stop):
        with pytest.raises(RuntimeError, match="loop"):
            await asyncio.wait_for(asyncio.to_thread(asyncio.run, mistake()), 5)
    await log.open_gate()
    assert await ref == "mine"


async def test_two_runtimes_do_not_know_each_other(rt: aiodaft.Runtime) -> None:
    async with aiodaft.Runtime(preload=(), gpus=1) as other:
        here, there = await rt.spawn(Echo), await other.spawn(Relay)
        name = (info := await rt.info(here)).name
        assert info.pid != (await other.info(there)).pid
        with pytest.raises(ValueError, match=f"{name} belongs to another runtime"):
            await other.stop(here)
        with pytest.raises(ValueError, match=f"{name} belongs to another runtime"):
            await other.on(with_=here).spawn(Echo)
        with pytest.raises(ValueError, match=f"{name} belongs to another runtime"):
            await other.name(here, "stranger")
        async with rt.mesh(1) as mesh:
            with pytest.raises(ValueError, match=r"^<Mesh of .*> belongs to another runtime"):
                await other.stop(mesh)
        truth = f"<Echo {name} in .* another runtime, that of {controller_of(rt).name}: pass a handle of this one"
        with pytest.raises(aiodaft.exceptions.SerializationError, match=rf"^args\[0\] of Relay.call_other .*{truth}"):
            there.call_other(here, 1)
        assert (await here.echo(1), (await there.call_other(await other.spawn(Echo), 2))) == (1, 2)
    assert await here.echo("outlives it") == "outlives it"


async def test_a_ref_of_another_runtime_is_refused(rt: aiodaft.Runtime) -> None:
    async with aiodaft.Runtime(preload=()) as other:
        here, there = await rt.spawn(Echo), await other.spawn(Echo)
        refs = [here.echo(bytes(1_000_000)), rt.put(bytes(1_000_000)), here.echo(1), rt.put([1])]
        await asyncio.gather(*(ref.ready() for ref in refs[1:]))
        truth = f"another runtime, that of {controller_of(rt).name}: await it, and pass its value"
        for ref in refs:
            for argument in (ref, {"deep": [ref]}, Holder(ref), aiodaft.Refs([ref]).gather()):
                with pytest.raises(aiodaft.exceptions.SerializationError, match=truth):
                    there.echo(argument)
            with pytest.raises(aiodaft.exceptions.SerializationError, match=truth):
                other.put([ref])
            with pytest.raises(aiodaft.exceptions.SerializationError, match=truth):
                aiodaft.compile(lambda x, ref=ref: there.echo([x, ref]))
            with pytest.raises(aiodaft.exceptions.SerializationError, match=truth):
                aiodaft.compile(lambda x, ref=ref: there.echo(ref))
        assert await there.echo("fine") == "fine"


async def test_a_ref_or_handle_of_a_closed_runtime_is_refused_and_its_value_can_be_passed(rt: aiodaft.Runtime) -> None:
    here = await rt.spawn(Echo)
    async with aiodaft.Runtime(preload=()) as other:
        there = await other.spawn(Echo)
        group = await other.group(2, Echo)
        ref = there.echo([1])
        assert await ref == [1]
        name, pickled = controller_of(other).name, pickle.dumps(there)
        assert f"<Runtime {name} open" in repr(other)
    for argument in (ref, there, [there], group):
        with pytest.raises(
            aiodaft.exceptions.SerializationError, match=f"another runtime, that of {name}, which is closed"
        ):
            here.echo(argument)
    assert await here.echo(await ref) == [1]
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        there.echo(1)
    with pytest.raises(ValueError, match=f"handle of Echo-1 belongs to another runtime, that of {name}"):
        pickle.loads(pickled)


async def test_the_surrounding_runtime_is_the_one_that_is_meant(rt: aiodaft.Runtime) -> None:
    async with aiodaft.Runtime(preload=()) as inner:
        assert "closed" not in repr(inner)
        channel = aiodaft.Channel[int](1)
        assert repr(channel).endswith(f"of {controller_of(inner).name}>")
    # The inner one is gone; there is only one left that can be meant.
    assert repr(aiodaft.Channel[int](1)).endswith(f"of {controller_of(rt).name}>")


async def test_a_runtime_inside_an_actor_is_its_own(rt: aiodaft.Runtime) -> None:
    probe = await rt.spawn(Probe)
    value, pid = await probe.inner_runtime({"deep": [1]})
    assert value == {"deep": [1]}
    assert not is_alive(pid)
    assert await probe.echo("outer goes on") == "outer goes on"


@pytest.mark.asyncio(loop_scope="function")
async def test_spawns_under_way_fail_with_the_fork_server(own_rt: aiodaft.Runtime) -> None:
    await own_rt.stop(await own_rt.spawn(Echo))
    before = await resources_of(own_rt)
    spawning = [asyncio.get_running_loop().create_task(awaited(own_rt.on(gpus=1).spawn(Probe))) for _ in range(4)]
    # The orders are out, and nothing has come back.
    os.kill(fork_server_of(own_rt), signal.SIGSTOP)
    while len(launcher_of(own_rt).workers) < 4:
        await asyncio.sleep(0)
    os.kill(fork_server_of(own_rt), signal.SIGKILL)
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*spawning, return_exceptions=True)
    assert all(isinstance(outcome, aiodaft.SpawnFailed) for outcome in outcomes), outcomes
    assert await resources_of(own_rt) == before
