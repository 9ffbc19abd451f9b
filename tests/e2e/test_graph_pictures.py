"""Pictures, texts and times of compiled graphs (row CR11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from graph_actors import Node

import aiodaft
from aiodaft import Ref

pytestmark = pytest.mark.asyncio(loop_scope="module")


def titles(svg: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]


async def test_a_graph_is_drawn_and_described_with_its_actors_and_calls(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    a, b = [await module_rt.spawn(Node, name) for name in "ab"]

    def flow(x: Ref[Any]) -> list[Ref[Any]]:
        return [b.pid(), b.same([a.same(x), x])]

    async with aiodaft.compile(flow) as graph:
        graph.draw(tmp_path / "graph.svg")
        svg = (tmp_path / "graph.svg").read_text()
        assert graph._repr_svg_() == svg
        assert svg in graph._repr_html_()
        names = [(await module_rt.info(actor)).name for actor in (a, b)]
        assert [title.partition(",")[0] for title in titles(svg)] == [
            "controller", *names[::-1], "input 0", "Node.pid", "Node.same", "Node.same", "output 0", "output 1",
        ]  # fmt: skip
        text = graph.describe()
        assert text.startswith("3 calls to 2 actors\n")
        assert f"%3 = {names[1]}.same(%2, %0)" in text
        assert [line.split()[-3:-1] for line in text.splitlines() if ".pid()" in line] == [["#", "int,"]]
        assert text.endswith("return %1, %3")
        assert repr(graph) == "<Graph of 3 calls to 2 actors>"
    # Also when it is closed.
    assert graph.describe() == text
