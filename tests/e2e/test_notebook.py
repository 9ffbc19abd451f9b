"""The runtime in a live notebook: top-level await, redefined classes, interrupts and restarts (row CR10)."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")

from leaks import wait_gone
from notebook import SETUP, Notebook, open_notebook

# The loop that counts is the kernel's.
pytestmark = pytest.mark.asyncio(loop_scope="module", loop_factories=["asyncio"])

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

EDITED = """
import aiodaft

class Edited(aiodaft.Actor):
    @aiodaft.method
    async def step(self, x):
        return x + 1
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kernel() -> AsyncIterator[Notebook]:
    async with open_notebook() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def notebook(kernel: Notebook, nothing_left_behind: None) -> AsyncIterator[Notebook]:
    """The kernel of this module, in which no runtime is open."""
    yield kernel
    await kernel.stop()


async def test_a_class_of_one_cell_is_spawned_in_the_next_and_called_in_a_third(notebook: Notebook) -> None:
    await notebook.value("rt = await aiodaft.start()")
    await notebook.value(CLASS)
    await notebook.value("counter = await rt.spawn(Counter, 5)")
    assert await notebook.value("await counter.add(1)") == 6
    assert await notebook.value("ref = counter.add(2)\nawait counter.add(ref)") == 16
    assert await notebook.value("await counter.where() not in (0, os.getpid())") is True
    assert await notebook.value("await asyncio.gather(counter.add(0), ref)") == [16, 8]
    assert notebook.processes()
    await notebook.stop()
    assert notebook.processes() == set()


async def test_a_cell_that_is_run_again_spawns_the_class_as_it_is_now(notebook: Notebook) -> None:
    await notebook.value("rt = await aiodaft.start()")
    await notebook.value(CLASS)
    await notebook.value("old = await rt.spawn(Counter, 1)")
    await notebook.value(CLASS.replace("+= n", "+= 100 * n").replace("add(self, n)", "add(self, n=1)"))
    await notebook.value("new = await rt.spawn(Counter, 1)")
    # The old one is called as before, also by the new class's name of its method.
    assert await notebook.value("[await old.add(1), await new.add(1), await new.add()]") == [2, 101, 201]
    assert await notebook.value("await (await rt.group(2, Counter, 0)).all(Counter.add)") == [100, 100]
    before = notebook.processes()
    await notebook.value("rt = await aiodaft.start()")
    assert notebook.processes() == before
    assert await notebook.value("await new.add(1)") == 301
    await notebook.value("await aiodaft.stop()\nrt = await aiodaft.start()")
    assert wait_gone(before) == set()
    assert await notebook.value("await (await rt.spawn(Counter, 3)).add(1)") == 103
    gone = await notebook.run("await new.add(1)")
    assert gone.error is not None
    assert gone.error.startswith("RuntimeClosed")


async def test_start_can_be_run_again_whatever_has_failed(notebook: Notebook) -> None:
    start = "rt = await aiodaft.start()\nechoes = await rt.spawn(Echo)\nawait echoes.echo('alive')"
    await notebook.value("from actors import Echo\nfrom failing import Failing")
    assert await notebook.value(start) == "alive"
    # An error that the cell raises, and one that no code sees.
    failed = await notebook.run("failing = await rt.spawn(Failing)\nawait failing.raise_value_error('in this cell')")
    assert failed.error == "ValueError: in this cell"
    assert await notebook.value(start) == "alive"
    unseen = await notebook.run("failing.raise_value_error('unseen')\nawait failing.use(1)")
    assert "ValueError: unseen" in unseen.printed
    assert await notebook.value(start) == "alive"
    # A dead actor, and dead processes.
    await notebook.value("await rt.kill(failing)")
    dead = await notebook.run("await failing.use(1)")
    assert (dead.error or "").startswith("ActorDied")
    assert await notebook.value(start) == "alive"
    await notebook.value("import signal\nos.kill((await rt.info(echoes)).pid, signal.SIGKILL)")
    assert await notebook.value(start) == "alive"
    # Other options are those of another runtime.
    refused = await notebook.run("await aiodaft.start(gpus=2)")
    assert (refused.error or "").startswith("RuntimeError: a runtime is open already")
    assert await notebook.value("await aiodaft.stop()\nawait aiodaft.stop()\nrt = await aiodaft.start(gpus=2)") is None
    assert await notebook.value("await rt.aclose()\n" + start) == "alive"


async def test_an_error_of_a_method_shows_its_lines_in_the_cell_of_its_class(notebook: Notebook) -> None:
    await notebook.value("rt = await aiodaft.start()")
    cell = """\
        # The class
        class Careful(aiodaft.Actor):
            @aiodaft.method
            async def divide(self, a, b):
                # More lines
                return a / b
    """
    await notebook.value(cell)
    failed = await notebook.run("careful = await rt.spawn(Careful)\nawait careful.divide(1, 0)")
    shown = [line.strip() for line in failed.traceback.splitlines()]
    assert "----> 2 await careful.divide(1, 0)" in shown
    assert "----> 6         return a / b" in shown
    # None of the runtime's own frames.
    assert "ref_state.py" not in failed.traceback
    assert shown[-2:] == ["ZeroDivisionError: division by zero", shown[-1]]
    assert shown[-1].startswith("raised by Careful.divide in Careful-")


async def test_an_interrupted_cell_cancels_its_call_and_leaves_the_runtime_usable(notebook: Notebook) -> None:
    await notebook.value("from actors import Sleeper\nrt = await aiodaft.start()\nsleeper = await rt.spawn(Sleeper)")
    cell = """
        import time
        ref = sleeper.sleep(60)
        await sleeper.history()
        print("under way", flush=True)
        try:
            await ref
        finally:
            landed = time.monotonic()
    """
    seconds: list[float] = []
    for _ in range(3):
        interrupted = await notebook.run(textwrap.dedent(cell), when="under way", then=notebook.interrupt)
        assert (interrupted.error or "").startswith("CancelledError")
        landed = await notebook.value("landed")
        assert isinstance(landed, float)
        seconds.append(landed - interrupted.acted_at)
    # Of a machine that is busy with other things, the best.
    assert min(seconds) < 0.3
    assert await notebook.value("await sleeper.history()") == ["sleep began", "sleep cleaned up"] * 3
    assert await notebook.value("await sleeper.sleep(0, 'next')") == "next"


async def test_a_cell_that_computes_is_interrupted_and_the_actors_live_on(notebook: Notebook) -> None:
    await notebook.value("from actors import Echo\nrt = await aiodaft.start()\necho = await rt.spawn(Echo)")
    computing = await notebook.run(
        "print('computing', flush=True)\nwhile True: pass", when="computing", then=notebook.interrupt
    )
    assert computing.error == "KeyboardInterrupt: "
    assert await notebook.value("await echo.echo('alive')") == "alive"


async def test_a_spawn_that_is_interrupted_leaves_no_actor(notebook: Notebook) -> None:
    await notebook.value("rt = await aiodaft.start()")
    cell = """
        class Slow(aiodaft.Actor):
            async def __aenter__(self):
                print("entering", flush=True)
                await asyncio.Event().wait()
            async def __aexit__(self, *exc_info): ...
        await rt.spawn(Slow)
    """
    interrupted = await notebook.run(textwrap.dedent(cell), when="entering", then=notebook.interrupt)
    assert (interrupted.error or "").startswith("CancelledError")
    assert await notebook.value("[name for node in await rt.nodes() for name in range(node.actors)]") == []


async def test_an_error_that_no_code_sees_shows_up_and_ends_no_cell(notebook: Notebook) -> None:
    await notebook.value("from failing import Failing\nrt = await aiodaft.start()\nfailing = await rt.spawn(Failing)")
    # The second answer comes after the error.
    cell = """
        failing.raise_value_error("no code sees this")
        await failing.use("the cell went on")
    """
    output = await notebook.run(textwrap.dedent(cell))
    assert output.error is None
    assert output.result == "'the cell went on'"
    assert "no code sees this" in notebook.printed


async def test_new_actors_have_the_code_that_autoreload_has_loaded_and_old_ones_theirs(
    notebook: Notebook, tmp_path: Path
) -> None:
    module = tmp_path / "edited.py"
    module.write_text(EDITED)
    await notebook.value(f"%load_ext autoreload\n%autoreload 2\nsys.path.insert(0, {str(tmp_path)!r})\nimport edited")
    await notebook.value("rt = await aiodaft.start()\nold = await rt.spawn(edited.Edited)")
    assert await notebook.value("await old.step(1)") == 2
    later = (
        "x + OFFSET + far\n\n    @aiodaft.method\n    async def added(self):\n        return 'added'\n\nOFFSET = 100\n"
    )
    module.write_text(EDITED.replace("x + 1", later).replace("step(self, x)", "step(self, x, far=0)"))
    assert await notebook.value("new = await rt.spawn(edited.Edited)\nawait new.step(1, far=1000)") == 1101
    assert await notebook.value("[await new.added(), await old.step(1)]") == ["added", 2]
    refused = await notebook.run("await old.added()")
    assert refused.error == "AttributeError: Edited-1 has no remote method 'added'"
    # The members of a group are new, too; so is an actor that shares the process of an old one.
    assert await notebook.value("await (await rt.group(2, edited.Edited)).all(edited.Edited.step, 1)") == [101, 101]
    await notebook.value("%autoreload 0")


@pytest.mark.parametrize("now", [False, True], ids=["in order", "by SIGKILL"])
async def test_restarting_the_kernel_leaves_no_worker(nothing_left_behind: None, now: bool) -> None:
    async with open_notebook() as own:
        await own.value("from actors import Sleeper\nrt = await aiodaft.start()\nsleeper = await rt.spawn(Sleeper)")
        await own.value("ref = sleeper.sleep(60)\nlen(await sleeper.history())")
        before = own.processes()
        assert len(before) == 2
        await own.restart(now=now)
        assert wait_gone(before) == set()
        again = "from actors import Echo\nrt = await aiodaft.start()\nawait (await rt.spawn(Echo)).echo('again')"
        assert await own.value(SETUP + again) == "again"
