"""Actors that are stopped or stuck, and actors that only seem so (D60-D62 of the fault tests)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from actors import Echo, Relay
from inside import agent_of, fork_server_of, peer_of, timeouts_of
from leaks import ended, is_alive
from stuck import Stuck, Unhurried
from supervised import AT_ONCE

import aiodaft
from aiodaft import Patience, Restart
from aiodaft._runtime.process import Env, Timeouts
from aiodaft.actor import target_of

# These tests use timers of the loop and nothing else of it.
pytestmark = pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])

QUICK = Patience(suspect_after=0.3, lost_after=1)


@pytest.fixture
def rt(module_rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch) -> aiodaft.Runtime:
    monkeypatch.setattr(timeouts_of(module_rt), "report", 0.1)
    return module_rt


async def test_d60_a_stopped_actor_is_suspected_and_cleared_when_it_goes_on(
    rt: aiodaft.Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = await rt.on(patience=Patience(0.3, None)).spawn(Stuck)
    assert not (await rt.info(stuck)).suspect
    ref = stuck.stop_itself()
    while not (seen := await rt.info(stuck)).suspect:
        pass
    assert seen.alive
    assert seen.silent_for > 0.2
    assert f"{seen.name} (pid {seen.pid}) has not answered for" in caplog.text
    assert "it is stopped (SIGSTOP); under way: Stuck.stop_itself" in caplog.text
    assert not ref.done()
    os.kill(seen.pid, signal.SIGCONT)
    assert await ref == "continued"
    monkeypatch.setattr(timeouts_of(rt), "report", 20)
    now = await rt.info(stuck)
    assert (now.suspect, now.silent_for) == (False, 0)
    while f"{seen.name} (pid {seen.pid}) answers again" not in caplog.text:
        await asyncio.sleep(0.01)
    assert "lost" not in caplog.text


async def test_d60_an_actor_that_stays_stopped_is_given_up_and_its_callers_hear(rt: aiodaft.Runtime) -> None:
    stuck, relay = await rt.on(patience=QUICK).spawn(Stuck), await rt.spawn(Relay)
    pid, remote = (await rt.info(stuck)).pid, target_of(stuck).remote
    assert await relay.call_other(stuck, 1) == 1
    ref = stuck.stop_itself()
    while not (await rt.info(stuck)).suspect:
        pass
    through = relay.call_other(stuck, 2)
    with pytest.raises(
        aiodaft.exceptions.PeerLost, match=r"Stuck-\d+ \(pid \d+\) has not answered .* Patience\(lost_after=1\)"
    ) as lost:
        await ref
    assert lost.value.executed is None
    assert lost.value.last_method == "Stuck.stop_itself"
    with pytest.raises(aiodaft.exceptions.PeerLost, match="has not answered"):
        await through
    with pytest.raises(aiodaft.exceptions.PeerLost, match="has not answered") as later:
        await stuck.echo("are you there?")
    assert later.value.executed is False
    seen = await rt.info(stuck)
    assert (seen.alive, seen.pid) == (False, None)
    # It cannot come back, and no other process in its name.
    assert not is_alive(pid)
    ours, theirs = socket.socketpair()
    with theirs:
        peer_of(rt).connections.attach(remote, ours)
        assert theirs.recv(1 << 10) == b""


async def test_one_that_is_given_up_is_restarted_with_the_patience_and_the_gpus_that_it_had(
    rt: aiodaft.Runtime,
) -> None:
    policy = Restart(intensity=2, period=600, backoff=AT_ONCE)
    stuck = await rt.on(gpus=1, patience=QUICK, restart=policy).spawn(Stuck)
    before = await rt.info(stuck)
    for epoch in (1, 2):
        with pytest.raises(aiodaft.exceptions.PeerLost, match="has not answered"):
            await stuck.stop_itself()
        assert await stuck.echo("back") == "back"
        seen = await rt.info(stuck)
        assert (seen.name, seen.gpus, seen.alive) == (before.name, before.gpus, True)
        assert (seen.epoch, seen.restarts) == (epoch, epoch)
        assert isinstance(seen.last_error, aiodaft.exceptions.PeerLost)
        processes = (await rt.stack()).processes
        assert [process.pid for process in processes if seen.name in process.actors] == [seen.pid]


async def test_d61_c_code_that_keeps_the_interpreter_is_reported_and_not_given_up(
    rt: aiodaft.Runtime, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    stuck = await rt.on(patience=Patience(0.1, 0.2)).spawn(Stuck)
    os.mkfifo(gate := tmp_path / "gate")
    ref = stuck.hold_interpreter(str(gate))
    # After 0.1, 0.2 and 0.4 s; a process that is stopped would be dead by then.
    while caplog.text.count("has not answered for") < 3:
        await asyncio.sleep(0.01)
    assert "in C code that keeps the interpreter to itself; under way: Stuck.hold_interpreter" in caplog.text
    assert "Patience(give_up=seconds) kills such a process" in caplog.text
    assert (await rt.info(stuck)).suspect
    os.close(os.open(gate, os.O_WRONLY))
    assert await ref == "free again"


async def test_d61_c_code_that_keeps_the_interpreter_is_given_up_where_patience_says_so(
    rt: aiodaft.Runtime, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    os.mkfifo(gate := str(tmp_path / "gate"))
    stuck, excused = await rt.on(patience=Patience(0.3, None, give_up=1)).spawn(Stuck), await rt.spawn(Unhurried)
    excused_call = excused.hold_interpreter(gate)
    with pytest.raises(
        aiodaft.exceptions.PeerLost,
        match=r"Patience\(give_up=1\).*keeps the interpreter.*under way: Stuck.hold_interpreter",
    ):
        await stuck.hold_interpreter(gate)
    assert not excused_call.done()
    assert "Unhurried" not in caplog.text
    await rt.kill(excused)
    with pytest.raises(aiodaft.ActorDied, match="killed by its owner"):
        await excused_call


async def test_d62_a_blocked_loop_is_no_death_and_its_lag_and_the_culprit_are_seen(
    rt: aiodaft.Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = await rt.on(patience=Patience(0.5, 0.8, give_up=0.8)).spawn(Stuck)
    gate = tmp_path / "gate"
    ref = stuck.block_loop(str(gate))
    # Longer than it would take to give it up.
    culprit = "Stuck.block_loop of Stuck-"
    while (seen := await rt.info(stuck)).loop_lag < 1 or culprit not in caplog.text:
        assert seen.alive
        assert seen.running in ((), ("Stuck.block_loop",))
    assert seen.running == ("Stuck.block_loop",)
    assert not seen.suspect
    warning = next(record.getMessage() for record in caplog.records if culprit in record.getMessage())
    assert f"(pid {seen.pid}) has kept the event loop" in warning
    assert "stuck.py:" in warning
    assert "in wait_for_file" in warning
    gate.touch()
    assert await ref == "free again"


async def test_a_task_that_blocks_the_loop_is_found_by_its_line(
    rt: aiodaft.Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = await rt.on(patience=Patience(0.5)).spawn(Stuck)
    gate = tmp_path / "gate"
    await stuck.block_loop_later(str(gate))
    while "a task or callback of Stuck-" not in caplog.text:
        await asyncio.sleep(0.01)
    assert "in wait_for_file" in caplog.text
    gate.touch()
    assert await stuck.echo("free again") == "free again"


async def test_code_of_the_program_that_blocks_its_loop_is_found_by_its_line(
    rt: aiodaft.Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, gate = await rt.spawn(Stuck), tmp_path / "gate"
    ref = stuck.block_loop(str(gate))
    blocked = "the event loop of this program has not turned"
    while blocked not in caplog.text:
        threading.Event().wait(0.01)
    warning = next(record.getMessage() for record in caplog.records if blocked in record.getMessage())
    assert "test_hangs.py:" in warning
    assert "in test_code_of_the_program_that_blocks_its_loop_is_found_by_its_line" in warning
    gate.touch()
    assert await ref == "free again"


async def test_a_controller_that_is_blocked_accuses_no_process(
    rt: aiodaft.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    echo = await rt.on(patience=Patience(None, 0.8)).spawn(Echo)
    # A notebook cell that computes, for longer than any actor may be silent.
    threading.Event().wait(1.2)
    while (seen := await agent_of(rt).process_of(target_of(echo).remote)) and seen.heartbeat.silent_for > 0.4:
        pass
    assert seen is not None
    assert await echo.echo("still here") == "still here"
    assert "not answered" not in caplog.text
    # No call was under way.
    assert "has not turned" not in caplog.text


async def test_a_process_that_is_given_up_ends_though_the_fork_server_is_stopped() -> None:
    env = Env(timeouts=Timeouts(exit_report=0.1, kill=0.1))
    async with aiodaft.Runtime(preload=(), patience=Patience(None, 0.5), env=env) as rt:
        stuck = await rt.spawn(Stuck)
        pid = (await rt.info(stuck)).pid
        os.kill(fork_server_of(rt), signal.SIGSTOP)
        with pytest.raises(aiodaft.exceptions.PeerLost):
            await stuck.stop_itself()
        await ended(pid)
        os.kill(fork_server_of(rt), signal.SIGCONT)
        assert await (await rt.spawn(Echo)).echo("goes on") == "goes on"


async def test_who_shares_a_process_with_a_patient_actor_is_waited_for_as_long(rt: aiodaft.Runtime) -> None:
    hasty = await rt.on(patience=Patience(None, 0.5)).spawn(Stuck)
    guest = await rt.on(with_=hasty, patience=Patience(None, None)).spawn(Stuck)
    other = await rt.on(patience=Patience(None, 0.5)).spawn(Stuck)
    ref = guest.stop_itself()
    with pytest.raises(aiodaft.exceptions.PeerLost):
        await other.stop_itself()
    seen = await rt.info(guest)
    assert seen.alive
    os.kill(seen.pid, signal.SIGCONT)
    assert await ref == "continued"


async def test_a_runtime_has_a_patience_that_actors_override() -> None:
    async with aiodaft.Runtime(preload=(), patience=Patience(None, 0.5)) as rt:
        with pytest.raises(aiodaft.exceptions.PeerLost):
            await (await rt.spawn(Stuck)).stop_itself()
