"""Actors that are restarted, and when it is enough (promise 5.7; fault tests 47, 48)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from actors import Echo
from inside import resources_of
from leaks import is_alive
from supervised import AT_ONCE, Heir, Member, Mortal, ThreadedHeir

import aiodaft
from aiodaft import Restart

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Long enough for no test to see its end.
SLOW = Restart(intensity=1, period=3600, backoff=aiodaft.Backoff(base=1000, max=1000))


def policy(intensity: int = 1, **options: Any) -> Restart:
    return Restart(intensity=intensity, period=600, backoff=AT_ONCE, **options)


async def kill(actor: Mortal, how: int = signal.SIGKILL) -> None:
    """Returns when the death is known."""
    with pytest.raises(aiodaft.ActorDied):
        await actor.die(how)


async def gone(scope: aiodaft.Scope, actor: object) -> aiodaft.state.ActorInfo:
    """Returns when the actor is down, and how it is."""
    while (info := await scope.info(actor)).alive:
        await asyncio.sleep(0)
    return info


async def free_gpus(rt: aiodaft.Runtime) -> float:
    return (await resources_of(rt))[1]["gpus"]


@contextlib.contextmanager
def limit_reached(deaths: int) -> Generator[list[aiodaft.exceptions.RestartLimitReached], None, None]:
    """Expects one error, with that many deaths."""
    caught: list[Any] = []
    try:
        yield caught
    except* aiodaft.exceptions.RestartLimitReached as group:
        caught += group.exceptions
    assert [len(error.attempts) for error in caught] == [deaths]


async def test_the_first_death_restarts_and_the_second_one_is_one_error_with_both(module_rt: aiodaft.Runtime) -> None:
    with limit_reached(2) as caught:
        async with module_rt.scope() as scope:
            actor = await scope.on(restart=policy(1)).spawn(Mortal, 10)
            first = await scope.info(actor)
            assert (first.epoch, first.restarts, first.last_error) == (0, 0, None)
            assert await actor.add(1) == 11
            under_way = actor.wait()
            with pytest.raises(aiodaft.ActorDied, match="SIGKILL") as death:
                await actor.die()
            assert death.value.executed is None
            with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
                await under_way
            # The constructor ran again, with the same arguments.
            assert await actor.get() == 10
            second = await scope.info(actor)
            assert (second.epoch, second.restarts, second.name) == (1, 1, first.name)
            assert second.pid != first.pid
            assert isinstance(second.last_error, aiodaft.ActorDied)
            assert not is_alive(first.pid)
            await kill(actor, signal.SIGSEGV)
            # The scope ends by itself.
            await asyncio.Event().wait()
    error = caught[0]
    assert isinstance(error, aiodaft.ActorDied)
    assert [attempt.signal for attempt in error.attempts if isinstance(attempt, aiodaft.ActorDied)] == [
        "SIGKILL", "SIGSEGV",
    ]  # fmt: skip
    assert error.signal == "SIGSEGV"
    assert "allows 1 restarts" in str(error)
    assert [note.split(":")[0] for note in error.__notes__] == ["death 1 of 2", "death 2 of 2"]
    assert f"(pid {first.pid}) was killed by SIGKILL" in error.__notes__[0]


@pytest.mark.parametrize(
    ("strategy", "left", "epochs"),
    [
        ("one_for_one", [], [0, 1, 0, 0]),
        ("one_for_all", ["d", "c", "a"], [1] * 4),
        ("rest_for_one", ["d", "c"], [0, 1, 1, 1]),
    ],
)
async def test_the_right_siblings_restart_stopped_in_reverse_and_started_in_order(
    module_rt: aiodaft.Runtime, tmp_path: Path, strategy: Any, left: str, epochs: list[int]
) -> None:
    notes = tmp_path / "notes"
    async with module_rt.scope(restart=policy(strategy=strategy)) as scope:
        members = {name: await scope.spawn(Member, name, str(notes)) for name in "abcd"}
        pids = [await member.pid() for member in members.values()]
        outsider = await module_rt.spawn(Echo)
        notes.write_text("")
        await kill(members["b"])
        # Calls wait for the restarted actors.
        now = [await member.pid() for member in members.values()]
        assert [old != new for old, new in zip(pids, now, strict=True)] == [bool(epoch) for epoch in epochs]
        assert [(await scope.info(member)).epoch for member in members.values()] == epochs
        made = [name for name, epoch in zip(members, epochs, strict=True) if epoch]
        assert notes.read_text().splitlines() == [f"{name} left" for name in left] + [f"{name} made" for name in made]
        assert await outsider.echo(1) == 1
        await module_rt.stop(outsider)
        notes.write_text("")
    assert notes.read_text().splitlines() == [f"{name} left" for name in "dcba"]


@pytest.mark.parametrize(
    ("kind", "code", "restarted"),
    [
        ("permanent", 0, True), ("transient", 3, True), ("transient", 0, False), ("temporary", 0, False),
        ("temporary", 3, False),
    ],
)  # fmt: skip
async def test_the_kind_says_which_ends_are_failures(
    module_rt: aiodaft.Runtime, kind: Any, code: int, restarted: bool
) -> None:
    async with module_rt.scope() as scope:
        actor = await scope.on(gpus=4, restart=policy(kind=kind)).spawn(Mortal)
        with pytest.raises(aiodaft.ActorDied, match=f"exit code {code}"):
            await actor.exit(code)
        if restarted:
            assert await actor.get() == 0
        else:
            with pytest.raises(aiodaft.ActorDied, match=f"exit code {code}") as caught:
                await actor.get()
            assert caught.value.executed is False
            # Its resources are free, and its end is no error of the scope.
            assert await free_gpus(module_rt) == 4
            assert not (await scope.info(actor)).alive


async def test_an_actors_own_kind_among_siblings_and_its_own_policy_apart_from_them(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    notes = str(tmp_path / "notes")
    async with module_rt.scope(restart=policy(strategy="one_for_all")) as scope:
        first = await scope.spawn(Mortal)
        helper = await scope.on(restart="temporary").spawn(Member, "helper", notes)
        alone = await scope.on(restart=policy(3)).spawn(Mortal)
        await kill(alone)
        await alone.get()
        assert (await scope.info(first)).epoch == 0
        await kill(first)
        await first.get()
        assert [(await scope.info(actor)).epoch for actor in (first, alone)] == [1, 1]
        with pytest.raises(aiodaft.ActorDied, match="Member-[0-9]+ was stopped with its siblings") as caught:
            await helper.get()
        assert caught.value.executed is False
        assert (tmp_path / "notes").read_text().splitlines() == ["helper made", "helper left"]


async def test_the_slot_stays_between_incarnations_and_is_free_at_the_end(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    place = module_rt.on(gpus=3, restart=policy())
    actor = await place.spawn(Mortal, 0, str(tmp_path / "notes"), gate=str(gate))
    assert await actor.visible() == "0,1,2"
    await kill(actor)
    down = await gone(module_rt, actor)
    assert (down.pid, down.alive, down.restarts) == (None, False, 0)
    assert await free_gpus(module_rt) == 1
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match="Mortal-[0-9]+ has 3"):
        await place.spawn(Mortal)
    waiting = actor.visible()
    await asyncio.to_thread(gate.write_text, "")
    assert await waiting == "0,1,2"
    assert await free_gpus(module_rt) == 1
    await module_rt.stop(actor)
    assert await free_gpus(module_rt) == 4


async def test_a_restart_that_fails_is_one_more_death(module_rt: aiodaft.Runtime, tmp_path: Path) -> None:
    async with module_rt.scope() as scope:
        place = scope.on(restart=policy(3))
        actor = await place.spawn(Mortal, 0, str(tmp_path / "a"), fails_in=(2, 3))
        await kill(actor)
        assert await actor.get() == 0
        info = await scope.info(actor)
        assert (info.epoch, info.restarts) == (3, 1)
        assert isinstance(info.last_error, ValueError)
    with limit_reached(3) as caught:
        async with module_rt.scope() as scope:
            actor = await scope.on(gpus=4, restart=policy(2)).spawn(Mortal, 0, str(tmp_path / "b"), fails_in=(2, 3, 4))
            waiting: aiodaft.Ref[Any] | None = None
            await kill(actor)
            waiting = actor.get()
            await asyncio.Event().wait()
    assert [type(attempt) for attempt in caught[0].attempts] == [aiodaft.ActorDied, ValueError, ValueError]
    assert "cannot be made in life 3" in caught[0].__notes__[2]
    assert waiting is not None
    assert waiting.exception() is caught[0]
    assert caught[0].executed is False
    assert await free_gpus(module_rt) == 4


async def test_a_new_incarnation_gets_back_its_state(module_rt: aiodaft.Runtime) -> None:
    heir = await module_rt.spawn(Heir, "fresh")
    assert await heir.get() == "fresh"
    for epoch in (1, 2):
        await kill(heir)
        assert await heir.get() == f"epoch {epoch}"
    threaded = await module_rt.on(restart=policy()).spawn(ThreadedHeir)
    await kill(threaded)
    assert await threaded.get() == "epoch 1 on a thread"
    with limit_reached(2) as caught:
        async with module_rt.scope() as scope:
            stubborn = await scope.on(restart=policy()).spawn(ThreadedHeir, "refuse")
            await kill(stubborn)
            await asyncio.Event().wait()
    assert isinstance(caught[0].attempts[1], RuntimeError)
    assert "the checkpoint is gone" in caught[0].__notes__[1]


async def test_arguments_of_the_constructor_are_those_of_the_first_time(module_rt: aiodaft.Runtime) -> None:
    numbers, weights = [1], module_rt.put(bytes(1_000_000))
    first = await module_rt.on(restart=policy()).spawn(Mortal, numbers)
    numbers.append(2)
    second = await module_rt.on(restart=policy()).spawn(Mortal, weights)
    # The refs are held as long as the actor may be made again.
    del weights
    for actor in (first, second):
        await kill(actor)
    assert await first.get() == [1]
    assert await second.get() == bytes(1_000_000)


async def test_stopping_and_killing_are_for_good(module_rt: aiodaft.Runtime) -> None:
    for end in (module_rt.stop, module_rt.kill):
        actor = await module_rt.on(gpus=4, restart=policy(9)).spawn(Mortal)
        guest = await module_rt.on(with_=actor, restart=policy(9)).spawn(Mortal)
        await module_rt.name(actor, "mortal")
        pid = await actor.pid()
        if end == module_rt.stop:
            await end(guest)
        await end(actor)
        assert not is_alive(pid)
        for one in (actor, guest):
            with pytest.raises(aiodaft.ActorDied, match="by its owner") as caught:
                await one.get()
            assert caught.value.executed is False
        with pytest.raises(aiodaft.NameNotFound):
            await module_rt.lookup("mortal", Mortal)
        assert await free_gpus(module_rt) == 4


@pytest.mark.parametrize("end", ["stop", "kill", "leave", "fail"])
@pytest.mark.parametrize("when", ["it waits", "it is being made"])
async def test_a_restart_under_way_ends_with_its_owners_interest(
    module_rt: aiodaft.Runtime, tmp_path: Path, when: str, end: str
) -> None:
    notes, gate = tmp_path / "notes", tmp_path / "gate"
    os.mkfifo(gate)
    with contextlib.suppress(ZeroDivisionError):
        async with module_rt.scope() as outer, outer.scope(restart=policy(strategy="one_for_all")) as scope:
            sibling = await scope.spawn(Mortal)
            place = scope.on(gpus=4, restart=SLOW) if when == "it waits" else scope.on(gpus=4)
            actor = await place.spawn(Mortal, 0, str(notes), gate=str(gate))
            await kill(actor)
            await gone(scope, actor)
            waiting = actor.get()
            while when != "it waits" and notes.read_text().count("made") < 2:
                await asyncio.sleep(0)
            if end == "stop":
                await scope.stop(actor)
            elif end == "kill":
                await scope.kill(actor)
            elif end == "fail":
                _ = 1 / 0
            if end in ("stop", "kill"):
                with pytest.raises(aiodaft.ActorDied, match="was stopped: stopped by its owner") as caught:
                    await waiting
                assert caught.value.executed is False
                assert await sibling.get() == 0
    assert isinstance(waiting.exception(), aiodaft.ActorDied)
    assert await free_gpus(module_rt) == 4
    # That no process is left is checked after every test.


async def test_actors_that_share_a_process_come_back_together(module_rt: aiodaft.Runtime) -> None:
    async with module_rt.scope() as scope:
        host = await scope.on(gpus=1, restart=policy()).spawn(Mortal, "host")
        guest = await scope.on(with_=host, restart=policy()).spawn(Mortal, "guest")
        pid = await guest.pid()
        await kill(guest)
        assert (await host.get(), await guest.get()) == ("host", "guest")
        assert pid != await host.pid() == await guest.pid()
        assert await guest.visible() == "0"
        # A newcomer waits for a sibling that is down, too.
        await scope.stop(guest)
    async with module_rt.scope(restart=policy()) as scope:
        host = await scope.spawn(Mortal)
        guest = await scope.on(with_=host).spawn(Mortal)
        # One process, one death: the policy allows one restart.
        await kill(host)
        assert await host.pid() == await guest.pid()
        await (await scope.on(with_=host).spawn(Mortal)).get()


async def test_a_guest_ends_alone_when_its_host_is_gone_for_good(module_rt: aiodaft.Runtime) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with module_rt.scope(restart=policy(strategy="one_for_all")) as scope:
            host = await scope.spawn(Mortal)
            guest = await scope.on(with_=host).spawn(Mortal, "guest")
            sibling = await scope.spawn(Mortal)
            await scope.stop(host)
            assert await guest.get() == "guest"
            await kill(sibling)
            await asyncio.Event().wait()
    # No restart is counted for it, so the limit of the policy is not reached.
    (error,) = raised.value.exceptions
    assert isinstance(error, aiodaft.ActorDied)
    assert re.fullmatch(
        r"Mortal-\d+ cannot be made again: Mortal-\d+, in the process of which it lived, is gone", str(error)
    )


async def test_services_and_members_of_groups_are_restarted(module_rt: aiodaft.Runtime) -> None:
    async with module_rt.scope() as scope, scope.on(restart=policy()).group(2, Heir) as group:
        await kill(group[1])
        assert await group.all(Heir.get) == [0, "epoch 1"]
        service = await scope.on(restart=policy()).spawn(list, [3, 1])
        os.kill((await scope.info(service)).pid, signal.SIGKILL)
        await gone(scope, service)
        assert await service.call(list.count, 3) == 1


async def test_what_cannot_be_a_policy_is_refused_at_the_line_that_says_it(module_rt: aiodaft.Runtime) -> None:
    siblings: Any = policy(strategy="rest_for_one")
    wrong: Any = "always"
    with pytest.raises(ValueError, match=r"is about siblings: give it to their scope, `rt\.scope\(restart=\.\.\.\)`"):
        module_rt.on(restart=siblings)
    with pytest.raises(ValueError, match="kind='always' is none of permanent, transient, temporary"):
        module_rt.on(restart=wrong)
    for give in (lambda: module_rt.on(restart=3), lambda: module_rt.scope(restart=wrong)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"restart=.* is not an aiodaft\.Restart"):
            give()
    with pytest.raises(ValueError, match="is about siblings"):
        type("Wrong", (aiodaft.Actor,), {}, restart=siblings)
    with pytest.raises(TypeError, match=r"Wrong\.on_restart takes the epoch of the new incarnation"):
        type("Wrong", (aiodaft.Actor,), {"on_restart": lambda self: None})
