"""The programs of examples/frameworks.py, killed from outside while nobody uses them (row CR12)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from frameworks import Calculator, Engine
from leaks import ended, is_alive

import aiodaft


def program_of(actor: aiodaft.state.ActorInfo) -> int:
    """The process that an actor has started."""
    assert actor.pid is not None
    return int(Path(f"/proc/{actor.pid}/task/{actor.pid}/children").read_text())


def environment_of(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/environ").read_text().strip("\0").split("\0")
    return {line.partition("=")[0] for line in lines}


@pytest.mark.programs
@pytest.mark.timeout(180)
async def test_an_actor_ends_with_its_program_and_a_program_with_its_actor(nothing_left_behind: None) -> None:
    # Modules that the actors import are imported once.
    async with aiodaft.Runtime(preload=("frameworks",)) as rt:
        on = rt.on(restart=aiodaft.Restart(intensity=2, period=60))
        calculator, engine = await on.spawn(Calculator), await on.spawn(Engine)
        await kill_both(rt, calculator, lambda: calculator.ask("'hello'"))
        await kill_both(rt, engine, lambda: engine.generate("olleh"))


async def kill_both(rt: aiodaft.Runtime, actor: aiodaft.Actor, use: Callable[[], aiodaft.Ref[str]]) -> None:
    """Kill the program, then its actor, while nobody uses them."""
    for who in (program_of, lambda info: info.pid):
        assert await come_back(use) == "hello"
        info = await rt.info(actor)
        pids = info.pid, program_of(info)
        os.kill(who(info), signal.SIGKILL)
        await ended(*pids)
    assert await come_back(use) == "hello"
    last = program_of(await rt.info(actor))
    # Nothing but the variables of the program that made the actor.
    assert environment_of(last) <= set(os.environ)
    await rt.stop(actor)
    assert not is_alive(last)


async def come_back(use: Callable[[], aiodaft.Ref[str]]) -> str:
    """The first answer."""
    while True:
        # A call that is sent before a death is known fails.
        with suppress(aiodaft.ActorDied):
            return await use()
