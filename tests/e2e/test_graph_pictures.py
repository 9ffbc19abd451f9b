"""Pictures, texts and times of compiled graphs (row CR11)."""

from __future__ import annotations

import asyncio
import re
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from graph_actors import Node
from html_page import Page
from rich.console import Console

import aiodaft
from aiodaft import Ref
from aiodaft._runtime.serialization.encoded import kind_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_graph_is_drawn_and_described_with_its_actors_and_calls(module_rt: aiodaft.Runtime) -> None:
    a, b = [await module_rt.spawn(Node, name) for name in "ab"]

    def flow(x: Ref[Any]) -> list[Ref[Any]]:
        return [b.pid(), b.same([a.same(x), x])]

    async with aiodaft.compile(flow) as graph:
        infos = [await module_rt.info(actor) for actor in (b, a)]
        names = [info.name for info in infos]
        drawn = graph.draw()
        assert drawn.startswith("flowchart TB\n")
        assert re.findall(r'"(.+?)[<"]', drawn) == [
            "input 0", f"{names[0]} in {infos[0].process}", "Node.pid", "Node.same",
            f"{names[1]} in {infos[1].process}", "Node.same", "output 0", "output 1",
        ]  # fmt: skip
        text = graph.describe()
        assert text.startswith("3 calls to 2 actors\n")
        assert f"%3 = {names[0]}.same(%2, %0)" in text
        assert [line.split()[-3:-1] for line in text.splitlines() if ".pid()" in line] == [["#", "int,"]]
        assert text.endswith("return %1, %3")
        read = Page(graph._repr_html_())
        assert read.title == "Graph of 3 calls to 2 actors"
        head, *rows = read.rows
        assert head == ["", "call", "value", "time", "line"]
        assert [row[:2] for row in rows] == [
            ["%0", "input"], ["%1", f"{names[0]}.pid()"], ["%2", f"{names[1]}.same(%0)"],
            ["%3", f"{names[0]}.same(%2, %0)"],
        ]  # fmt: skip
        assert rows[1][2:4] == ["int", ""]
        assert rows[1][4].startswith("test_graph_pictures.py:")
        assert repr(graph) == "<Graph of 3 calls to 2 actors>"
        Console(file=(shown := StringIO()), width=200).print(graph)
        assert shown.getvalue() == f"{text}\n"
    # Also when it is closed.
    assert graph.describe() == text


async def test_a_timed_graph_knows_what_its_steps_took_and_made_when_they_ran_last(
    module_rt: aiodaft.Runtime,
) -> None:
    a, b = [await module_rt.spawn(Node, name) for name in "ab"]

    def flow(x: Ref[Any], gate: Ref[Any]) -> Ref[Any]:
        return a.on_thread(b.wait(a.same(x)), gate)

    async with aiodaft.compile(flow, timed=True) as graph:
        assert [step.seconds for step in await graph.times()] == [None] * 3
        run = graph(b"x" * 300_000, 1)
        # Waits for the run.
        asking = asyncio.get_running_loop().create_task(graph.times())
        await b.state()
        assert not asking.done()
        await b.open()
        same, wait, on_thread = await asking
        await run
        assert [(step.method, step.value) for step in (same, wait)] == [("Node.same", "bytes"), ("Node.wait", "bytes")]
        assert same.size == wait.size
        assert same.size is not None
        assert 300_000 <= same.size < 301_000
        assert same.actor == (await module_rt.info(a)).name
        assert on_thread.value in ("int", "list")
        assert all(step.seconds is not None and step.seconds > 0 for step in (same, wait, on_thread))
        assert graph.draw().count("<br>bytes 293 KiB<br>") == graph.describe().count("bytes 293 KiB, ") == 2
        # A step that fails has made nothing, but ran; the one after it keeps its last time.
        failing = graph(13, 13)
        with pytest.raises(ValueError, match="does not take 13"):
            await failing
        same, wait, on_thread = await graph.times()
        assert (same.value, same.size, on_thread.value) == ("int", None, "")
        assert on_thread.seconds is not None
    with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="the graph is closed"):
        await graph.times()


@pytest.mark.parametrize(("dtype", "kind"), [("torch.bfloat16", "bfloat16[8, 64]"), ("int32", "int32[8, 64]")])
async def test_tensors_and_arrays_have_a_dtype_and_a_shape(dtype: str, kind: str) -> None:
    assert kind_of(SimpleNamespace(shape=(8, 64), dtype=dtype)) == kind


async def test_a_graph_without_times_says_how_to_get_them(module_rt: aiodaft.Runtime) -> None:
    a = await module_rt.spawn(Node)
    async with aiodaft.compile(a.same) as graph:
        with pytest.raises(RuntimeError, match="compile it with timed=True"):
            await graph.times()
