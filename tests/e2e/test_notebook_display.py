"""The views of a live notebook: completion, documentation, objects as HTML, and bars that move."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")
pytest.importorskip("tqdm")

from notebook import Notebook, open_notebook

# The loop that counts is the kernel's.
pytestmark = [pytest.mark.programs, pytest.mark.asyncio(loop_scope="module", loop_factories=["asyncio"])]

CLASS = """
from tqdm.asyncio import tqdm

class Shelf(aiodaft.Actor):
    '''Has books.'''

    def __init__(self, room: int = 8) -> None:
        self._room = room

    @aiodaft.method
    def get(self, title: str, edition: int = 1) -> str:
        '''Return a book.'''
        return f"{title}, edition {edition}"

    @aiodaft.method
    async def titles(self):
        yield "Refs"

    @aiodaft.method
    def read(self, gate):
        with tqdm(total=2, desc="reading", mininterval=0) as bar:
            bar.update()
            open(gate).close()
            bar.update()
        return "read"

    @aiodaft.method(concurrency=1)
    async def copy(self, gate):
        if gate:
            await asyncio.to_thread(open, gate)
        return "copied"

    def unreachable(self) -> None: ...
"""


METHODS = ["copy", "get", "read", "titles"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def notebook() -> AsyncIterator[Notebook]:
    """A kernel with a runtime that has one actor."""
    async with open_notebook() as opened:
        await opened.value(CLASS)
        await opened.value("rt = await aiodaft.start()\nshelf = await rt.spawn(Shelf)")
        yield opened
        await opened.stop()


async def test_tab_offers_the_methods_of_handles_and_the_names_of_arguments(notebook: Notebook) -> None:
    assert await notebook.complete("shelf.") == METHODS
    assert await notebook.complete("shelf.ge") == ["get"]
    assert "edition=" in await notebook.complete("shelf.get(ed")
    assert await notebook.complete("shelf.get.") == ["tell"]
    assert "unreachable" not in await notebook.complete("shelf.un")
    # Without running anything: a handle is an instance of its class to tools that read the source.
    static = await notebook.complete("async def f():\n    other = await rt.spawn(Shelf)\n    other.")
    assert {"get", "titles"} <= set(static)
    of_runtime = await notebook.value("[name for name in dir(rt) if not name.startswith('_')]")
    assert await notebook.complete("rt.") == of_runtime


async def test_the_help_of_methods_has_their_signature_docs_and_source(notebook: Notebook) -> None:
    for what in ("shelf.get", "shelf.get("):
        shown = await notebook.look_up(what)
        assert "shelf.get(title: str, edition: int = 1) -> str" in shown
        assert "Return a book." in shown
        assert "**kwargs" not in shown
    source = await notebook.look_up("shelf.get", source=True)
    assert 'return f"{title}, edition {edition}"' in source
    of_class = await notebook.look_up("Shelf.get")
    assert "Shelf.get(self, title: str, edition: int = 1) -> str" in of_class
    assert "**kwargs" not in of_class
    about = await notebook.look_up("shelf")
    assert "Has books." in about
    assert "get(title: str, edition: int = 1) -> str" in about


async def test_objects_are_shown_as_html_and_a_failed_cell_as_text_alone(notebook: Notebook) -> None:
    shown = await notebook.run("rt")
    assert "<td" in (shown.html or "")
    assert "Shelf-" in (shown.html or "")
    shown = await notebook.run("shelf.get('Refs')")
    assert "Shelf.get of Shelf-" in (shown.html or "")
    assert (shown.result or "").startswith("<Ref of Shelf.get")
    shown = await notebook.run("dead = await rt.spawn(Shelf)\nawait rt.kill(dead)\ndead.get('x').exception()")
    assert (shown.error or "").startswith("InvalidStateError")
    shown = await notebook.run("ref = dead.get('x')\nawait ref.ready()\nref.exception()")
    assert "<li>ActorDied: " in (shown.html or "")
    shown = await notebook.run("await ref")
    assert (shown.error or "").startswith("ActorDied")
    assert "<li>" not in shown.traceback


async def test_bars_of_actors_and_over_maps_move_while_the_cell_runs(notebook: Notebook, fifo: Path) -> None:
    async def release() -> None:
        os.close(os.open(fifo, os.O_WRONLY))

    shown = await notebook.run(f"await shelf.read({str(fifo)!r})", when="1/2", then=release)
    assert (shown.result, shown.error) == ("'read'", None)
    assert re.search(r"\(Shelf-1 pid=\d+\) reading: 100%.* 2/2 .*\n$", shown.printed)
    cell = f"""
        async with rt.group(2, Shelf) as group:
            copied = tqdm(group.map(Shelf.copy, ["", {str(fifo)!r}, ""]), total=3, mininterval=0)
            done = [one async for one in copied]
        done
    """
    shown = await notebook.run(textwrap.dedent(cell), when="1/3", then=release)
    assert (shown.result, shown.error) == ("['copied', 'copied', 'copied']", None)
    assert "100%" in shown.printed
