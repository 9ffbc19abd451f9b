"""A dead actor: the errors of its callers (C33, C35-C37 and C42 of the fault tests)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from actors import Box, Echo, Relay, Sleeper
from cgroups import little_memory, move
from failing import Failing
from inside import agent_of, fork_server_of, timeouts_of

import aiodaft
from aiodaft.actor import target_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_c33_a_killed_actor_fails_its_calls_with_the_evidence(rt: aiodaft.Runtime) -> None:
    failing, other = await rt.spawn(Failing), await rt.spawn(Echo)
    waiting = failing.wait()
    with pytest.raises(aiodaft.ActorDied, match="was killed by SIGKILL") as caught:
        await failing.kill_itself()
    assert caught.value.signal == "SIGKILL"
    assert caught.value.executed is None
    assert caught.value.actor == (await rt.info(failing)).name
    assert caught.value.last_lines == ("last words",)
    assert caught.value.last_method == "Failing.wait"
    assert "; under way: Failing.wait" in str(caught.value)
    assert "last words" in caught.value.__notes__[0]
    with pytest.raises(aiodaft.ActorDied):
        await waiting
    assert await other.echo("untouched") == "untouched"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
async def test_c35_the_signal_is_named(rt: aiodaft.Runtime, number: signal.Signals) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(aiodaft.ActorDied) as caught:
        await failing.kill_itself(number)
    assert caught.value.signal == number.name


async def test_c35_an_exit_is_not_an_error_of_the_controller(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(aiodaft.ActorDied, match="ended with exit code 3") as caught:
        await failing.exit(3)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("method", ["raise_named", "raise_named_on_thread"])
@pytest.mark.parametrize(("name", "code"), [("KeyboardInterrupt", 130), ("SystemExit", 0)])
async def test_a7_what_ends_a_program_ends_the_actor_and_not_its_caller(
    rt: aiodaft.Runtime, method: str, name: str, code: int
) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(aiodaft.ActorDied, match=f"ended with exit code {code}") as caught:
        await getattr(failing, method)(name)
    assert (caught.value.exit_code, caught.value.executed) == (code, None)


@pytest.mark.parametrize(("code", "exit_code", "said"), [(3, 3, ()), ("no more work", 1, ("no more work",))])
async def test_a7_a_task_of_an_actor_that_exits_ends_the_actor(
    rt: aiodaft.Runtime, code: int | str, exit_code: int, said: tuple[str, ...]
) -> None:
    failing = await rt.spawn(Failing)
    waiting = failing.wait()
    for call in (failing.exit_in_a_task(code), waiting):
        with pytest.raises(aiodaft.ActorDied) as caught:
            await call
        assert (caught.value.exit_code, caught.value.last_lines) == (exit_code, said)


async def test_c36_the_kernel_that_kills_for_want_of_memory_is_named_and_others_live() -> None:
    with little_memory(256 << 20) as group:
        async with aiodaft.Runtime(preload=(), stop_grace=1) as rt:
            await kill_one_of_four(rt, group)


async def kill_one_of_four(rt: aiodaft.Runtime, group: Path) -> None:
    other = await rt.spawn(Echo)
    # Processes that are forked from here on belong to it.
    move(fork_server_of(rt), group)
    victims = [await rt.spawn(Failing) for _ in range(3)]
    waiting = victims[0].wait()
    os.kill((await rt.info(victims[0])).pid, signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied, match="was killed by SIGKILL") as killed:
        await waiting
    assert not killed.value.oom
    with pytest.raises(aiodaft.ActorDied, match=r"was killed by the kernel \(SIGKILL\): out of memory") as caught:
        await victims[1].eat_memory()
    assert (caught.value.oom, caught.value.signal) == (True, "SIGKILL")
    waiting = victims[2].wait()
    os.kill((await rt.info(victims[2])).pid, signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied) as killed:
        await waiting
    assert not killed.value.oom
    assert await other.echo("untouched") == "untouched"


async def test_the_last_method_is_known_for_every_caller(rt: aiodaft.Runtime) -> None:
    b, a = await rt.on(patience=aiodaft.Patience(0.1, None)).spawn(Sleeper), await rt.spawn(Sleeper)
    ref = a.call(b, 60)
    while (await agent_of(rt).process_of(target_of(b).remote)).heartbeat.last_method != "Sleeper.sleep":
        pass
    os.kill((await rt.info(b)).pid, signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied, match=r"under way: Sleeper.sleep, for [\d.]+ s or more") as caught:
        await ref
    assert caught.value.last_method == "Sleeper.sleep"
    assert caught.value.last_method_for is not None


async def test_c37_a_call_to_a_dead_actor_fails_at_once_and_says_it_did_not_run(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(aiodaft.ActorDied):
        await failing.kill_itself()
    sent = rt.traffic().messages_sent
    with pytest.raises(aiodaft.ActorDied) as caught:
        await failing.use(1)
    assert caught.value.executed is False
    assert rt.traffic().messages_sent == sent


async def test_an_actor_that_calls_a_dead_one_gets_the_same_error(rt: aiodaft.Runtime) -> None:
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    # This call is under way, so that its caller gets the error, also if the others hear of the death too late.
    waiting = (await rt.on(with_=echo).spawn(Sleeper)).sleep(60)
    assert await relay.call_other(echo, 1) == 1
    info = await rt.info(echo)
    os.kill(info.pid, signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied, match=rf"{info.name} .* was killed by SIGKILL"):
        await waiting
    with pytest.raises(aiodaft.ActorDied, match=rf"{info.name} .* was killed by SIGKILL"):
        await relay.call_other(echo, 2)
    with pytest.raises(aiodaft.ActorDied, match=rf"{info.name} .* was killed by SIGKILL"):
        await (await rt.spawn(Relay)).call_other(echo, 3)


async def test_a_value_is_lost_with_its_producer(rt: aiodaft.Runtime) -> None:
    producer, consumer = await rt.spawn(Echo), await rt.spawn(Echo)
    small, big = producer.echo([1]), producer.echo(bytes(1_000_000))
    await asyncio.gather(small.ready(), big.ready())
    await rt.kill(producer)
    assert await small == [1]
    assert await consumer.echo(small) == [1]
    with pytest.raises(aiodaft.ActorDied, match="killed by its owner"):
        await big
    with pytest.raises(aiodaft.ActorDied, match="killed by its owner"):
        await consumer.echo(big)


async def test_a_ref_says_that_its_owner_died(rt: aiodaft.Runtime) -> None:
    echo, owner, holder = await rt.spawn(Echo), await rt.spawn(Relay), await rt.spawn(Relay)
    box = await owner.ref_of_other(echo, bytes(1_000_000))
    await holder.hold(Box(box.ref))
    await rt.kill(owner)
    with pytest.raises(aiodaft.exceptions.OwnerDied):
        await box.ref
    with pytest.raises(aiodaft.exceptions.OwnerDied):
        await holder.read_held()
    while (await rt.info(echo)).stored_bytes:
        await asyncio.sleep(0)


async def test_a_call_to_a_dead_actor_is_cancelled_at_once(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    await rt.kill(echo)
    ref = echo.echo(1)
    assert ref.cancel()
    assert ref.done()
    with pytest.raises(aiodaft.CallCancelled, match="before it was sent"):
        await ref


async def test_death_in_the_middle_of_a_chain_reaches_its_end(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Sleeper), await rt.spawn(Echo)
    last = b.echo(b.echo(a.sleep(60)))
    await a.history()
    os.kill((await rt.info(a)).pid, signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await last
    assert await b.echo("goes on") == "goes on"


@pytest.mark.asyncio(loop_scope="function")
async def test_c42_killing_the_fork_server_ends_actors_and_says_so(
    own_rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The actor ends some time after the fork server; until then, no call has failed because of that.
    monkeypatch.setattr(timeouts_of(own_rt), "blame", 60)
    echo = await own_rt.spawn(Sleeper)
    ref = echo.sleep(60)
    await echo.history()
    os.kill(fork_server_of(own_rt), signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied):
        await ref
    with pytest.raises(aiodaft.SpawnFailed, match="fork server is gone"):
        await own_rt.spawn(Echo)


@pytest.mark.asyncio(loop_scope="function")
async def test_a_death_is_seen_while_the_fork_server_is_stopped(
    own_rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is settled by waiting for long.
    monkeypatch.setattr(timeouts_of(own_rt), "exit_report", 3600)
    killed, exiting = await own_rt.spawn(Failing), await own_rt.spawn(Failing)
    os.kill(fork_server_of(own_rt), signal.SIGSTOP)
    with pytest.raises(aiodaft.ActorDied, match="was killed by SIGKILL") as caught:
        await killed.kill_itself()
    assert (caught.value.signal, caught.value.exit_code) == ("SIGKILL", None)
    with pytest.raises(aiodaft.ActorDied, match="ended with exit code 0") as caught:
        await exiting.exit(0)
    assert (caught.value.signal, caught.value.exit_code) == (None, 0)
    os.kill(fork_server_of(own_rt), signal.SIGCONT)
    assert await (await own_rt.spawn(Failing)).count() == 0


class Ticking(aiodaft.Actor):
    """Has a background task, which tells another actor how it ended."""

    def __init__(self, keeper: Ticking | None = None) -> None:
        self.keeper = keeper
        self.told: list[str] = []
        self.broken = asyncio.Event()
        self.awaited: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        aiodaft.create_task(self.tick())

    async def __aexit__(self, *error: object) -> None:
        pass

    async def tick(self) -> None:
        try:
            await self.broken.wait()
        except asyncio.CancelledError:
            if self.keeper is not None:
                await self.keeper.tell(f"{aiodaft.current_actor() is not None}, cancelled")
            raise
        if self.awaited is not None:
            await self.awaited
        raise ConnectionError("the database is gone")

    @aiodaft.method
    async def break_it(self) -> None:
        self.broken.set()

    @aiodaft.method
    async def break_by_cancellation(self) -> None:
        self.awaited = asyncio.get_running_loop().create_future()
        self.awaited.cancel()
        self.broken.set()

    @aiodaft.method
    async def tell(self, what: str) -> None:
        self.told.append(what)

    @aiodaft.method
    async def all_told(self) -> list[str]:
        return self.told

    @aiodaft.method
    def in_thread(self) -> None:
        aiodaft.create_task(self.tick())


async def test_the_error_of_a_background_task_is_the_actors(rt: aiodaft.Runtime) -> None:
    ticking = await rt.on(restart="temporary").spawn(Ticking)
    await ticking.break_it()
    with pytest.raises(aiodaft.ActorDied) as caught:
        while True:
            await ticking.all_told()
    assert caught.value.exit_code == 1
    assert "tick" in "".join(caught.value.last_lines[:3])
    task = r"the background task 'Ticking.tick' of Ticking-\d+ \(pid \d+, \S+\) failed: "
    assert re.fullmatch(task + re.escape("ConnectionError('the database is gone')"), caught.value.last_lines[-1])


async def test_a_background_task_that_awaited_something_cancelled_has_failed(rt: aiodaft.Runtime) -> None:
    ticking = await rt.on(restart="temporary").spawn(Ticking)
    await ticking.break_by_cancellation()
    with pytest.raises(aiodaft.ActorDied, match="what it awaited was cancelled"):
        while True:
            await ticking.all_told()


async def test_a_supervised_actor_is_restarted_when_its_background_task_fails(rt: aiodaft.Runtime) -> None:
    ticking = await rt.on(restart=aiodaft.Restart()).spawn(Ticking)
    await ticking.tell("of the first incarnation")
    await ticking.break_it()
    while True:
        with contextlib.suppress(aiodaft.ActorDied):
            if not await ticking.all_told():
                break


async def test_a_background_task_ends_with_its_actor(rt: aiodaft.Runtime) -> None:
    keeper = await rt.spawn(Ticking)
    ticking = await rt.on(with_=keeper).spawn(Ticking, keeper)
    await rt.stop(ticking)
    assert await keeper.all_told() == ["True, cancelled"]


async def test_a_background_task_belongs_to_an_actor(rt: aiodaft.Runtime) -> None:
    with pytest.raises(RuntimeError, match="of an actor: no code of an actor runs here$"):
        aiodaft.create_task(asyncio.sleep(0))
    ticking = await rt.spawn(Ticking)
    with pytest.raises(RuntimeError, match=r"of an actor: this is a thread: use it in `async def` methods"):
        await ticking.in_thread()
