"""The runtime in a live notebook: top-level await, redefined classes, interrupts and restarts (row CR10)."""

from __future__ import annotations

import ast
import os
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")

from leaks import is_alive
from notebook import Notebook, open_notebook

# The loop that counts is the kernel's.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

SUPPORT = Path(__file__).parents[1] / "support"

SETUP = f"""
import asyncio, os, sys
sys.path.insert(0, {str(SUPPORT)!r})
import aiodaft
"""

CLASS = """
class Counter(aiodaft.Actor):
    def __init__(self, start):
        self.value = start

    @aiodaft.method
    async def add(self, n):
        self.value += n
        return self.value

    @aiodaft.method
    async def where(self):
        return os.getpid()
"""


@pytest.fixture
async def notebook(nothing_left_behind: None) -> AsyncIterator[Notebook]:
    async with open_notebook(SETUP) as opened:
        yield opened


async def value(notebook: Notebook, cell: str) -> object:
    """What the last expression of a cell is."""
    output = await notebook.run(textwrap.dedent(cell))
    assert output.error is None, "\n".join(output.traceback)
    return None if output.result is None else ast.literal_eval(output.result)


def wait_gone(pids: set[int]) -> set[int]:
    """The processes that do not end, however slow this machine is."""
    deadline = time.monotonic() + 10
    while (left := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline:
        os.sched_yield()
    return left


async def test_a_class_of_one_cell_is_spawned_in_the_next_and_called_in_a_third(notebook: Notebook) -> None:
    await value(notebook, "rt = await aiodaft.start()")
    await value(notebook, CLASS)
    await value(notebook, "counter = await rt.spawn(Counter, 5)")
    assert await value(notebook, "await counter.add(1)") == 6
    assert await value(notebook, "ref = counter.add(2)\nawait counter.add(ref)") == 16
    assert await value(notebook, "await counter.where() not in (0, os.getpid())") is True
    assert await value(notebook, "await asyncio.gather(counter.add(0), ref)") == [16, 8]
    assert notebook.processes()
    await value(notebook, "await aiodaft.stop()")
    assert wait_gone(notebook.processes()) == set()


async def test_a_cell_that_is_run_again_spawns_the_class_as_it_is_now(notebook: Notebook) -> None:
    await value(notebook, "rt = await aiodaft.start()")
    await value(notebook, CLASS)
    await value(notebook, "old = await rt.spawn(Counter, 1)")
    await value(notebook, CLASS.replace("+= n", "+= 100 * n"))
    await value(notebook, "new = await rt.spawn(Counter, 1)")
    assert await value(notebook, "[await old.add(1), await new.add(1)]") == [2, 101]
    before = notebook.processes()
    await value(notebook, "rt = await aiodaft.start()")
    assert notebook.processes() == before
    assert await value(notebook, "await new.add(1)") == 201
    await value(notebook, "await aiodaft.stop()\nrt = await aiodaft.start()")
    assert wait_gone(before) == set()
    assert await value(notebook, "await (await rt.spawn(Counter, 3)).add(1)") == 103
    gone = await notebook.run("await new.add(1)")
    assert gone.error is not None
    assert gone.error.startswith("RuntimeClosed")


async def test_an_interrupted_cell_cancels_its_call_and_leaves_the_runtime_usable(notebook: Notebook) -> None:
    await value(notebook, "from actors import Sleeper\nrt = await aiodaft.start()\nsleeper = await rt.spawn(Sleeper)")
    cell = """
        ref = sleeper.sleep(60)
        await sleeper.history()
        print("under way", flush=True)
        await ref
    """
    interrupted = await notebook.run(textwrap.dedent(cell), interrupt_at="under way")
    assert interrupted.error is not None
    assert interrupted.error.startswith(("KeyboardInterrupt", "CancelledError"))
    assert await value(notebook, "await sleeper.history()") == ["sleep began", "sleep cleaned up"]
    assert await value(notebook, "await sleeper.sleep(0, 'next')") == "next"


async def test_a_cell_that_computes_is_interrupted_and_the_actors_live_on(notebook: Notebook) -> None:
    await value(notebook, "from actors import Echo\nrt = await aiodaft.start()\necho = await rt.spawn(Echo)")
    computing = await notebook.run("print('computing', flush=True)\nwhile True: pass", interrupt_at="computing")
    assert computing.error == "KeyboardInterrupt: "
    assert await value(notebook, "await echo.echo('alive')") == "alive"


async def test_an_error_that_no_code_sees_shows_up_and_ends_no_cell(notebook: Notebook) -> None:
    await value(notebook, "from failing import Failing\nrt = await aiodaft.start()\nfailing = await rt.spawn(Failing)")
    # The second answer comes after the error.
    cell = """
        failing.raise_value_error("no code sees this")
        await failing.use("the cell went on")
    """
    output = await notebook.run(textwrap.dedent(cell))
    assert output.error is None
    assert output.result == "'the cell went on'"
    assert "no code sees this" in notebook.printed
    await value(notebook, "await aiodaft.stop()")
    assert await value(notebook, "rt = await aiodaft.start()\nawait (await rt.spawn(Failing)).use('again')") == "again"


@pytest.mark.parametrize("now", [False, True], ids=["in order", "by SIGKILL"])
async def test_restarting_the_kernel_leaves_no_worker(notebook: Notebook, now: bool) -> None:
    await value(notebook, "from actors import Sleeper\nrt = await aiodaft.start()\nsleeper = await rt.spawn(Sleeper)")
    await value(notebook, "ref = sleeper.sleep(60)\nlen(await sleeper.history())")
    before = notebook.processes()
    assert len(before) == 2
    await notebook.restart(now=now)
    assert wait_gone(before) == set()
    again = SETUP + "from actors import Echo\nrt = await aiodaft.start()\nawait (await rt.spawn(Echo)).echo('again')"
    assert await value(notebook, again) == "again"
