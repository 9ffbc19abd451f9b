"""Handles of restarted actors, and calls that are made again (promises 5.1, 5.2; fault tests 13, 49)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
from actors import Echo
from here import current_peer
from inside import peer_of
from leaks import is_alive
from supervised import AT_ONCE, Mortal, Responder

import aiodaft
from aiodaft import Restart
from aiodaft._protocol.calls.outgoing import NOWHERE, Location
from aiodaft._protocol.ids import ActorId
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft.actor import Handle, target_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLICY = Restart(intensity=9, period=600, backoff=AT_ONCE)
PINNED = Restart(intensity=9, period=600, backoff=AT_ONCE, follow=False)


async def kill(actor: Mortal) -> None:
    """Returns when the death is known."""
    with pytest.raises(aiodaft.ActorDied):
        await actor.die()


async def kill_before(caller: Responder, actor: Mortal, gated: Gated) -> None:
    """Returns when the death is known here and in the process of another caller: its call under way fails of it."""
    under_way = caller.ask("wait")
    while not gated.count("waiting"):
        await asyncio.sleep(0)
    await kill(actor)
    with pytest.raises(aiodaft.ActorDied):
        await under_way


class Gated:
    """An actor. Its next incarnation waits until the test lets it be made."""

    def __init__(self, tmp_path: Path) -> None:
        self.notes, self.gate = tmp_path / "notes", tmp_path / "gate"
        os.mkfifo(self.gate)

    async def spawn(self, scope: aiodaft.Scope, start: Any = 0) -> Mortal:
        return await scope.on(restart=POLICY).spawn(Mortal, start, str(self.notes), gate=str(self.gate))

    async def open(self) -> None:
        await asyncio.to_thread(self.gate.write_text, "")

    def count(self, what: str) -> int:
        return self.notes.read_text().splitlines().count(what)


async def test_handles_follow_wherever_they_are(module_rt: aiodaft.Runtime) -> None:
    actor = await module_rt.on(restart=POLICY).spawn(Mortal)
    # One handle came with the constructor, which will run again; one by a call; one is used late.
    told = await module_rt.on(restart=POLICY).spawn(Responder, actor)
    keeps, late = await module_rt.spawn(Responder), await module_rt.spawn(Responder, actor)
    await keeps.keep(actor)
    await module_rt.name(actor, "mortal")
    for epoch in (1, 2):
        pid = await actor.pid()
        await kill(actor)
        # A call that another process sends before it hears of the death is under way: the method says that it may come
        # twice.
        answers = [await caller.ask("survive", 0) for caller in (told, keeps)]
        assert {answer[1] for answer in answers} == {await actor.pid()} != {pid}
        found = await module_rt.lookup("mortal", Mortal)
        assert found == actor
        assert await found.pid() == await actor.pid()
        assert (await module_rt.info(found)).names == ("mortal",)
        assert (await module_rt.info(actor)).epoch == epoch
        if epoch == 1:
            # It is made again with the handle that it was made with, which is older than the actor's incarnation.
            os.kill((await module_rt.info(told)).pid, signal.SIGKILL)
            while (await module_rt.info(told)).restarts != 1:
                await asyncio.sleep(0)
            assert await told.ask("pid") == await actor.pid()
    assert await late.ask("pid") == await actor.pid()


async def test_handles_that_do_not_follow_refuse_until_they_are_renewed(module_rt: aiodaft.Runtime) -> None:
    async with module_rt.scope() as scope:
        old = await scope.on(restart=PINNED).spawn(Mortal)
        caller = await module_rt.spawn(Responder, old)
        await module_rt.name(old, "pinned")
        assert (await old.add(1), await caller.ask("add", 1)) == (1, 2)
        await kill(old)

        def from_another() -> aiodaft.Ref[Any]:
            return caller.ask("get")

        # The other process may not have heard yet: then its call is lost with the actor, and it has heard.
        with pytest.raises((aiodaft.exceptions.StaleHandle, aiodaft.ActorDied)):
            await from_another()
        for ask in (old.get, from_another):
            with pytest.raises(aiodaft.exceptions.StaleHandle, match="this handle leads to its epoch 0") as caught:
                await ask()
            assert caught.value.executed is (ask is from_another)
        # Also if no process ever called that incarnation.
        late = await module_rt.spawn(Responder, old)
        with pytest.raises(aiodaft.exceptions.StaleHandle, match="this handle leads to its epoch 0"):
            await late.ask("get")
        new = await module_rt.lookup("pinned", Mortal)
        assert new != old
        assert await new.get() == 0
        await caller.keep(new)
        assert await caller.ask("add", 3) == 3
        # Looking and stopping are about the actor, through any handle.
        assert (await scope.info(old)).epoch == 1
        await scope.stop(old)
        for handle in (old, new):
            with pytest.raises(aiodaft.ActorDied, match="stopped by its owner") as gone:
                await handle.get()
            assert gone.value.executed is False
        with pytest.raises(aiodaft.NameNotFound):
            await module_rt.lookup("pinned", Mortal)


async def test_calls_made_in_between_wait_in_order_with_the_arguments_they_were_given(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    gated = Gated(tmp_path)
    actor = await gated.spawn(module_rt, [0])
    caller = await module_rt.spawn(Responder, actor)
    await kill_before(caller, actor, gated)
    change = [1]
    first = actor.add(change)
    change.append(99)
    big, tell = actor.add([bytes(100_000)]), actor.add.tell([2])
    assert tell is None
    stream, elsewhere = actor.count(3), caller.ask("pid")
    last = actor.get()
    assert not last.done()
    await gated.open()
    assert await first == [0, 1]
    assert len(await big) == 3
    assert [item async for item in stream] == [0, 1, 2]
    assert await last == [0, 1, bytes(100_000), 2]
    assert await elsewhere == await actor.pid()


async def test_waiting_is_bounded_by_deadlines_cancellation_and_numbers(tmp_path: Path) -> None:
    gated = Gated(tmp_path)
    async with aiodaft.Runtime(preload=(), max_pending=3, stop_grace=1) as rt:
        actor = await gated.spawn(rt)
        caller = await rt.spawn(Responder, actor)
        await kill_before(caller, actor, gated)
        with pytest.raises(aiodaft.DeadlineExceeded):
            async with aiodaft.deadline(0.01):
                await actor.add(1)
        with pytest.raises(aiodaft.DeadlineExceeded):
            async with aiodaft.deadline(0.01):
                await caller.ask("add", 1)
        async with aiodaft.deadline(0.01):
            late = actor.add(1)
        with pytest.raises(aiodaft.DeadlineExceeded, match="before it was sent") as caught:
            await late
        assert caught.value.executed is False
        waiting = asyncio.get_running_loop().create_task(actor.add(1).value())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        cancelled = actor.add(1)
        assert cancelled.cancel()
        with pytest.raises(aiodaft.CallCancelled) as given_up:
            await cancelled
        assert given_up.value.executed is False
        async with actor.count(3):
            pass
        refs = [actor.add(10) for _ in range(3)]
        with pytest.raises(aiodaft.Overloaded):
            actor.add(10)
        with pytest.raises(aiodaft.exceptions.SerializationError):
            await gated_error(actor, refs)
        await gated.open()
        # None of the others ever came.
        assert await asyncio.gather(*refs[1:]) == [10, 20]


async def gated_error(actor: Mortal, refs: list[aiodaft.Ref[Any]]) -> None:
    """Make room for a call with an argument that cannot travel, and make it."""
    refs[0].cancel()
    await actor.add((lambda: (yield))())


async def test_what_was_under_way_is_not_made_again(module_rt: aiodaft.Runtime, tmp_path: Path) -> None:
    gated = Gated(tmp_path)
    actor = await gated.spawn(module_rt)
    caller = await module_rt.spawn(Responder, actor)
    refs = [actor.wait(), caller.ask("wait")]
    while gated.count("waiting") < 2:
        await asyncio.sleep(0)
    os.kill(await actor.pid(), signal.SIGKILL)
    for ref in refs:
        with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
            await ref
    await gated.open()
    assert await actor.get() == 0
    assert (gated.count("waiting"), gated.count("made")) == (2, 2)


@pytest.mark.parametrize("where", ["here", "in an actor"])
async def test_idempotent_calls_are_made_again_as_often_as_they_say(
    module_rt: aiodaft.Runtime, tmp_path: Path, where: str
) -> None:
    notes = tmp_path / "notes"
    actor = await module_rt.on(restart=POLICY).spawn(Mortal, 0, str(notes))
    caller = await module_rt.spawn(Responder, actor)

    def survive(*args: Any) -> aiodaft.Ref[Any]:
        return actor.survive(*args) if where == "here" else caller.ask("survive", *args)

    attempt, pid, value = await survive(2, bytes(2_000_000))
    assert (attempt, pid, value) == (3, await actor.pid(), bytes(2_000_000))
    assert notes.read_text().splitlines() == [
        "made",
        *(f"attempt {n}" for n in (1,)),
        "made",
        "attempt 2",
        "made",
        "attempt 3",
    ]
    notes.write_text("")
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL") as caught:
        await survive(9)
    # An error of the actor in between is the caller's own, which ran.
    assert caught.value.executed is (None if where == "here" else True)
    assert await actor.get() == 0
    assert [line for line in notes.read_text().splitlines() if line != "made"] == [f"attempt {n}" for n in (1, 2, 3, 4)]
    assert (await module_rt.info(actor)).restarts == 6


async def test_what_the_method_raises_is_no_reason_to_try_again(module_rt: aiodaft.Runtime, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    actor = await module_rt.on(restart=POLICY).spawn(Mortal, 0, str(notes))
    with pytest.raises(aiodaft.ActorDied, match="raised by the method itself") as caught:
        await actor.fail()
    assert caught.value.executed is True
    assert notes.read_text().splitlines() == ["made", "failing"]


async def test_refs_of_calls_made_again_can_be_passed_on(module_rt: aiodaft.Runtime) -> None:
    actor, echo = await module_rt.on(restart=POLICY).spawn(Mortal), await module_rt.spawn(Echo)
    caller = await module_rt.spawn(Responder, actor)
    for value in (b"small", bytes(2_000_000)):
        ref = actor.survive(1, value)
        # The consumer asks before it is known in which process the value will be made.
        consumed = echo.echo(ref)
        assert (await consumed)[::2] == (2, value)
        assert (await ref)[::2] == (2, value)
        # A ref as an argument is held for the second attempt as well.
        assert (await caller.ask("survive", 1, module_rt.put(value)))[::2] == (2, value)


async def test_a_call_made_again_can_be_cancelled_and_ends_with_the_actor(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    gated = Gated(tmp_path)
    actor = await gated.spawn(module_rt)
    ended, cancelled, late = (actor.survive(9) for _ in range(3))
    while gated.count("attempt 1") < 1 or gated.count("made") < 2:
        await asyncio.sleep(0)
    assert cancelled.cancel()
    with pytest.raises(aiodaft.CallCancelled) as given_up:
        await cancelled
    # The first attempt may have run.
    assert given_up.value.executed is None
    waiting = asyncio.get_running_loop().create_task(late.value())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await module_rt.stop(actor)
    with pytest.raises(aiodaft.ActorDied, match="stopped by its owner") as gone:
        await ended
    assert gone.value.executed is None
    assert gated.count("attempt 2") == 0


async def test_what_befalls_an_argument_says_nothing_of_the_actor(module_rt: aiodaft.Runtime) -> None:
    actor, other = await module_rt.on(restart=POLICY).spawn(Mortal), await module_rt.spawn(Mortal)
    caller = await module_rt.spawn(Responder, actor)
    call = actor.add(other.die())
    with pytest.raises(aiodaft.ActorDied, match="needed by|SIGKILL") as caught:
        await call
    assert caught.value.executed is False
    seen = await module_rt.info(actor)
    assert (seen.alive, seen.epoch, await caller.ask("get")) == (True, 0, 0)
    await module_rt.stop(actor)
    # Its process was found, too.
    assert not is_alive(seen.pid)


async def test_a_deadline_bounds_all_attempts(module_rt: aiodaft.Runtime, tmp_path: Path) -> None:
    gated = Gated(tmp_path)
    actor = await gated.spawn(module_rt)
    async with aiodaft.deadline(0.3):
        ref = actor.survive(1)
    with pytest.raises(aiodaft.DeadlineExceeded) as caught:
        await ref
    assert caught.value.executed is None
    assert gated.count("attempt 2") == 0


async def test_an_incarnation_in_the_same_process_takes_nothing_addressed_to_the_one_before(
    module_rt: aiodaft.Runtime,
) -> None:
    host, caller = await module_rt.spawn(Echo), await module_rt.spawn(Responder)
    async with module_rt.scope(restart=Restart(strategy="one_for_all", backoff=AT_ONCE)) as scope:
        guest = await scope.on(with_=host).spawn(Mortal)
        sibling = await scope.spawn(Mortal)
        await caller.keep(guest)
        assert await caller.ask("add", 1) == 1
        pid = await guest.pid()
        await kill(sibling)
        assert (await guest.pid(), await guest.get()) == (pid, 0)
        # The caller's connection is as good as it was: only the callee knows better.
        with pytest.raises(aiodaft.exceptions.StaleHandle, match="leads to an earlier incarnation"):
            await caller.ask("add", 1)
        assert await caller.ask("add", 1) == 1
        assert await guest.get() == 1


async def test_what_is_old_news_changes_nothing(module_rt: aiodaft.Runtime) -> None:
    actor = await module_rt.on(restart=POLICY).spawn(Mortal)
    life: Any = target_of(actor)
    before = life.place
    await kill(actor)
    assert await actor.get() == 0
    life.move(before)
    assert await actor.get() == 0
    assert current_peer().followers.get(life.owner, before, life.label) is life
    assert isinstance(life, FollowingTarget)


async def test_callers_that_wait_for_an_actor_do_not_change_what_others_hear_of_its_end(
    module_rt: aiodaft.Runtime,
) -> None:
    peer = peer_of(module_rt)
    life = FollowingTarget(peer.followers, Location(NOWHERE, ActorId(1 << 30)), peer.process.id, "a ghost", None)
    waiting = Handle(life, Mortal).get()
    error = aiodaft.ActorDied("calls that were under way get copies of this")
    life.end(error)
    with pytest.raises(aiodaft.ActorDied) as caught:
        await waiting
    assert (caught.value.executed, error.executed) == (False, None)


async def test_a_call_that_is_over_leaves_nothing_to_collect(module_rt: aiodaft.Runtime) -> None:
    actor = await module_rt.on(restart=POLICY).spawn(Mortal, [1])
    gc.disable()
    try:
        # One with a value as its answer, one that is encoded, and one that is kept to be made again.
        for call in (actor.pid, actor.get, lambda: actor.survive(0, [2])):
            ref = call()
            state = weakref.ref(state_of(ref))
            await ref
            del ref
            assert state() is None
    finally:
        gc.enable()
