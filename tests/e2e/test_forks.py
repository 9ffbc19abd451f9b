"""A process that has a runtime forks: the child can do nothing with it, and nothing to it. And one that just ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actors import Echo, Sleeper
from conformance import ForkedChild
from forking import FORK, Forker, in_a_child, wait_for_a_signal
from inside import fork_server_of
from leaks import is_alive, wait_ended

import aiodaft
from aiodaft._runtime.process import Env, Timeouts

SUPPORT = Path(__file__).parents[1] / "support"

# A warning of later Pythons about any fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


# Debug mode tells of slow steps of a loop, which says more of the machine.
QUIET = "import logging; logging.getLogger('asyncio').addFilter(lambda record: 'Executing' not in record.msg)\n"


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, with everything that Python warns of."""
    code = QUIET + textwrap.dedent(program).format(support=str(SUPPORT))
    # From 3.12 on, Python warns of every fork of a process that has threads.
    fork_warning = "ignore:This process:DeprecationWarning"
    command = [sys.executable, "-X", "dev", "-W", fork_warning, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


async def test_h118_a_forked_child_is_refused_whatever_it_tries_and_the_parent_goes_on(rt: aiodaft.Runtime) -> None:
    echo, sleeper, forker = await rt.spawn(Echo), await rt.spawn(Sleeper), await rt.spawn(Forker)
    known, kept, pending = echo.echo("known"), echo.echo(bytes(1_000_000)), sleeper.sleep(60)
    await known
    await kept.ready()
    stream = forker.nothing()
    block = rt.spawn(Echo)
    async with block, rt.scope() as scope, aiodaft.compile(lambda x: echo.echo(x)) as graph:
        found = in_a_child({
            "call": lambda: echo.echo(1),
            "call of this process": lambda: rt.nodes(),
            "tell": lambda: echo.echo.tell(1),
            "stream": lambda: forker.nothing(),
            "next item": lambda: anext(stream),
            "graph": lambda: graph(1),
            "spawn": lambda: rt.spawn(Echo),
            "spawn in a scope": lambda: scope.spawn(Echo),
            "stop": lambda: rt.stop(echo),
            "kill": lambda: rt.kill(echo),
            "info": lambda: rt.info(echo),
            "stack": lambda: rt.stack(),
            "put": lambda: rt.put(1),
            "channel": lambda: aiodaft.Channel[int](),
            "await": lambda: pending,
            "ready": lambda: pending.ready(),
            "fetch": lambda: kept,
        })
        assert found == dict.fromkeys(found, "is refused")
        found = in_a_child({
            "known value": lambda: known,
            "cancel": pending.cancel,
            "leave": scope.__aexit__,
            "leave a block": lambda: block.__aexit__(None, None, None),
            "close": rt.aclose,
        })
        assert found["known value"] == "gives 'known'"
        assert found["close"] == found["leave a block"] == "gives None"
        assert await graph(2) == 2
    await stream.aclose()
    assert len(await kept) == 1_000_000
    assert not pending.done()
    pending.cancel()
    assert await echo.echo("goes on") == "goes on"


async def test_a_child_keeps_seeing_values_that_its_parent_has_dropped(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)

    async def value(number: float) -> Any:
        return await echo.echo(np.full(100_000, number, np.float32))

    def made_here(number: float) -> Any:
        return aiodaft.memory.empty(100_000).fill_(number)

    held = [await value(1), made_here(1)]
    # By numpy: torch's own threads are not there in a child.
    child = ForkedChild(lambda: all(bool((np.asarray(tensor) == 1).all()) for tensor in held))
    held.clear()
    for number in range(2, 6):
        # Memory that was freed last is used first.
        assert (await value(number))[0] == made_here(number)[0] == number
    assert child.finds_it_true()


async def test_a_child_that_lives_on_does_not_keep_the_runtime_from_ending() -> None:
    ready = FORK.Event()
    child = FORK.Process(target=wait_for_a_signal, args=(ready,))
    try:
        # The fork server ends by itself, when its connection ends: it would be killed only after an hour.
        async with aiodaft.Runtime(preload=(), env=Env(timeouts=Timeouts(fork_server_end=3600))) as rt:
            pid, fork_server = await (await rt.spawn(Echo)).pid(), fork_server_of(rt)
            child.start()
            await asyncio.to_thread(ready.wait)
        assert not is_alive(fork_server)
        assert not is_alive(pid)
    finally:
        child.kill()
        child.join()
        child.close()


async def test_children_of_an_actor_are_refused_as_well_and_are_not_the_actor(rt: aiodaft.Runtime) -> None:
    forker, echo = await rt.spawn(Forker), await rt.spawn(Echo)
    assert await forker.call_in_a_child(echo) == {"call": "is refused", "await": "is refused"}
    assert await forker.terminate_a_child() == -15
    assert await forker.call_in_a_child(echo) == {"call": "is refused", "await": "is refused"}


def test_a_child_that_exits_ends_nothing_and_may_have_a_runtime_of_its_own() -> None:
    done = run("""
        import asyncio, os, sys
        sys.path.insert(0, {support!r})
        import aiodaft
        from actors import Echo

        async def use(value):
            rt = await aiodaft.start(preload=())
            return await (await rt.spawn(Echo)).echo(value)

        async def use_and_stop(value):
            print(await use(value), flush=True)
            await aiodaft.stop()

        loop = asyncio.new_event_loop()
        print(loop.run_until_complete(use("parent")), flush=True)
        if os.fork():
            assert os.wait()[1] == 0
            loop.run_until_complete(use_and_stop("parent again"))
            loop.close()
        else:
            asyncio.run(use_and_stop("child"))
            loop.close()
    """)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == ["parent", "child", "parent again"]


def test_a_child_of_a_program_under_run_ends_by_itself_and_by_a_signal_of_its_own() -> None:
    done = run("""
        import asyncio, sys
        sys.path.insert(0, {support!r})
        import aiodaft
        from actors import Echo
        from forking import FORK, terminate_a_child

        async def main():
            async with aiodaft.Runtime(preload=()) as rt:
                echo = await rt.spawn(Echo)
                child = FORK.Process(target=print, args=("child",))
                child.start()
                await asyncio.to_thread(child.join)
                print(child.exitcode, await asyncio.to_thread(terminate_a_child), await echo.echo("goes on"))

        aiodaft.run(main())
    """)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == ["child", "0 -15 goes on"]


# Signals.


def test_a_signal_that_reaches_a_child_first_ends_the_child_and_not_the_program() -> None:
    done = run("""
        import asyncio, os, signal, subprocess, sys
        sys.path.insert(0, {support!r})
        # Before aiodaft: its hook runs first.
        from early_signal import fork_a_child_that_is_terminated_at_once
        import aiodaft
        from forking import blocked_in_a_child

        def both():
            return blocked_in_a_child(), sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))

        async def main():
            print(fork_a_child_that_is_terminated_at_once())
            print(await asyncio.to_thread(fork_a_child_that_is_terminated_at_once))
            # Signals of the user stay blocked, and nothing else, in the child, the parent, and after an exec.
            print(both(), await asyncio.to_thread(both))
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            print(both(), flush=True)
            subprocess.run(["grep", "SigBlk", "/proc/self/status"], preexec_fn=lambda: None)
            await asyncio.sleep(0)

        aiodaft.run(main())
        print(both(), flush=True)
    """)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [
        "-15", "-15", "([], []) ([], [])", "([10], [10])", "SigBlk:\t0000000000000200", "([10], [10])",
    ]  # fmt: skip


async def test_a_signal_that_reaches_a_child_of_an_actor_first_ends_the_child_and_not_the_actor() -> None:
    # The hook that sends the signal is there before the worker's own.
    async with aiodaft.Runtime(preload=("early_signal",)) as rt:
        forker = await rt.spawn(Forker)
        assert await forker.terminate_a_child_at_once() == -15
        assert await forker.blocked() == ([], [])


# One that just ends.


def test_h117_a_runtime_that_is_left_open_is_warned_of_once() -> None:
    done = run("""
        import asyncio, sys
        sys.path.insert(0, {support!r})
        import aiodaft
        from actors import Echo

        async def leave(rt):
            await rt.__aenter__()
            echo = await rt.spawn(Echo)
            print((await rt.info(echo)).pid, len(await echo.echo(bytes(1_000_000))))

        asyncio.run(leave(aiodaft.Runtime(preload=())))
    """)
    pid, length = map(int, done.stdout.split())
    assert length == 1_000_000
    assert done.stderr.count("Warning") == done.stderr.count("ResourceWarning: a runtime was left open") == 1
    wait_ended(pid)
