"""Pictures and listings of dataflows: all is there, nothing overlaps, and large ones are abbreviated as stated."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
from dataflows import actor, flows, step
from hypothesis import given, settings

from aiodaft._protocol.graphs.layout import (
    FIRST_ROWS,
    LAST_ROWS,
    MOST_ROWS,
    ValueNote,
    duration,
    lay_out,
    listing_of,
    svg_of,
)
from aiodaft._protocol.graphs.plan import Dataflow
from aiodaft._protocol.numbers import amount

A, B, C = actor(0), actor(1), actor(2)
SVG = "{http://www.w3.org/2000/svg}"
Rect = tuple[float, float, float, float]


def groups(svg: str, kind: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f"{SVG}g[@class='{kind}']")


def rect(group: ElementTree.Element) -> Rect:
    """Left, top, right, bottom."""
    found = group.find(f"{SVG}rect")
    assert found is not None
    x, y, width, height = (float(found.attrib[name]) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def texts(group: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in group.iter(f"{SVG}text")]


def overlap(one: Rect, other: Rect) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def chain(length: int, actors: int) -> Dataflow[None]:
    keys = (A, B, C)[:actors]
    return Dataflow(1, tuple(step(keys[index % actors], index) for index in range(length)), (length,))


def test_what_the_runtime_does_beside_an_actor_is_shown_as_its_own() -> None:
    other = actor(0, number=17)
    beside = [replace(step(actor(0, number=3), index), name=step(A if index < 3 else other).name) for index in (2, 3)]
    flow = Dataflow(1, (step(A, 0), step(other, 1), *beside), (4,))
    assert [(lane.name, lane.steps) for lane in lay_out(flow, {}).lanes[1:]] == [("A-16", 2), ("A-17", 2)]
    assert listing_of(flow, {}).splitlines()[:3] == [
        "4 calls to 2 actors",
        "  A-16 in worker-0: 2 calls",
        "  A-17 in worker-0: 2 calls",
    ]


@given(flow=flows())
@settings(max_examples=100, deadline=None)
def test_every_step_is_drawn_in_the_lane_of_its_actor_below_what_it_needs(flow: Dataflow[None]) -> None:
    layout = lay_out(flow, {})
    assert sum(box.count for box in layout.boxes) == len(flow.steps)
    assert len(layout.lanes) == 1 + len({one.actor for one in flow.steps})
    assert sum(lane.steps for lane in layout.lanes) == len(flow.steps)
    for arrow in layout.arrows:
        assert arrow.source is not None
        assert arrow.target is not None
        assert arrow.source.row < arrow.target.row
        assert arrow.travels == (arrow.source.process != arrow.target.process)
    svg = svg_of(layout)
    lanes = [rect(group) for group in groups(svg, "lane")]
    boxes = [rect(group) for group in (*groups(svg, "step"), *groups(svg, "value"))]
    assert (len(lanes), len(boxes)) == (len(layout.lanes), len(layout.boxes))
    assert not any(overlap(*pair) for pair in combinations(lanes, 2))
    assert not any(overlap(*pair) for pair in combinations(boxes, 2))
    for box in boxes:
        assert sum(lane[0] < box[0] and box[2] < lane[2] and box[3] < lane[3] for lane in lanes) == 1
    assert len(groups(svg, "arrow")) == len(layout.arrows)


def test_calls_that_only_take_the_result_of_the_one_before_are_one_box() -> None:
    notes = {value: ValueNote("int", 8, 0.5) for value in range(1, 6)}
    layout = lay_out(chain(5, actors=1), notes)
    calls = [box for box in layout.boxes if box.count]
    assert [(box.count, box.note.seconds) for box in calls] == [(5, 2.5)]
    assert texts(groups(svg_of(layout), "step")[0]) == ["A.go x 5", "2.5 s", "int 8 B"]
    # Another step needs the second result, and the fourth is an output.
    steps = (*chain(5, actors=1).steps, step(B, 2))
    split = lay_out(Dataflow(1, steps, (4, 6)), {})
    assert [box.count for box in split.boxes if box.count] == [2, 2, 1, 1]


def test_of_many_rows_the_first_and_the_last_are_shown() -> None:
    assert lay_out(chain(MOST_ROWS - 2, actors=3), {}).band is None
    layout = lay_out(chain(2000, actors=3), {})
    assert layout.rows == FIRST_ROWS + 1 + LAST_ROWS
    shown = [box for box in layout.boxes if box.count]
    assert layout.hidden + len(shown) == layout.steps == 2000
    assert not any(box.row == layout.band for box in layout.boxes)
    assert sum(arrow.target is None for arrow in layout.arrows) == 1
    assert sum(arrow.source is None for arrow in layout.arrows) == 1
    svg = svg_of(layout)
    (band,) = groups(svg, "band")
    assert texts(band) == [f"{layout.hidden:,} calls not shown"]
    assert not any(overlap(rect(band), rect(box)) for box in groups(svg, "step"))


def test_a_chain_of_128_calls_over_three_actors_is_one_step_per_row() -> None:
    layout = lay_out(chain(128, actors=3), {})
    assert len(layout.boxes) == layout.rows - 1
    assert [lane.steps for lane in layout.lanes] == [0, 43, 43, 42]


def test_times_and_bytes_are_drawn_and_summed_up() -> None:
    flow = Dataflow(1, (step(A, 0), step(B, 1), step(C, 1), step(B, 2, 3)), (4,))
    notes = {0: ValueNote("int"), 1: ValueNote("float32[8, 64]", 2048, 0.25), 2: ValueNote("str", None, 0.5)}
    layout = lay_out(flow, notes)
    # The first result goes to two processes.
    assert layout.travelled == 2 * 2048
    assert [lane.seconds for lane in layout.lanes] == [None, 0.25, 0.5, None]
    svg = svg_of(layout)
    assert "last run: 750 ms in methods, 4 KiB between processes" in svg
    assert texts(groups(svg, "step")[0]) == ["A.go", "250 ms", "float32[8, 64] 2 KiB"]
    bars = [bar for group in groups(svg, "step") for bar in group.findall(f"{SVG}rect[@class='time']")]
    assert float(bars[1].attrib["width"]) == pytest.approx(2 * float(bars[0].attrib["width"]))


def test_names_are_escaped_and_long_ones_are_cut() -> None:
    odd = replace(step(A, 0), name='<A> & "B"', label="A.<lambda>", line="<stdin>:1")
    flow = Dataflow(1, (odd, replace(odd, label=f"A.{'long' * 20}", needs=(1,))), (2,))
    svg = svg_of(lay_out(flow, {1: ValueNote("dict[str, list<int>]")}))
    assert texts(groups(svg, "lane")[1]) == ['<A> & "B"', "2 calls"]
    first, second = groups(svg, "step")
    assert texts(first) == ["A.<lambda>", "dict[str, list<int>]"]
    (cut,) = texts(second)
    assert cut.startswith("A.long")
    assert cut.endswith("…")
    assert second.findtext(f"{SVG}title") == f"A.{'long' * 20}, <stdin>:1"


def test_a_listing_has_the_actors_and_a_line_for_each_step() -> None:
    flow = Dataflow(1, (step(A, 0), step(B, 1, 0, line="/home/me/main.py:7")), (2, 1))
    listing = listing_of(flow, {1: ValueNote("float32[8]", 32, 0.002)})
    assert [line.split("#")[0].rstrip() for line in listing.splitlines()] == [
        "2 calls to 2 actors",
        "  A-16 in worker-0: 1 call",
        "  A-16 in worker-1: 1 call",
        "  %0 = input",
        "  %1 = A-16.go(%0)",
        "  %2 = A-16.go(%1, %0)",
        "  return %2, %1",
    ]
    assert [line.split("# ")[1] for line in listing.splitlines() if "#" in line] == [
        "float32[8] 32 B, 2 ms, x.py:1",
        "main.py:7",
    ]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 10, "1 KiB"), (3 << 19, "1.5 MiB"), (5000 << 30, "5000 GiB")]
)
def test_bytes_have_a_unit(size: int, text: str) -> None:
    assert amount(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(2e-7, "0.2 us"), (0.00125, "1.25 ms"), (0.5, "500 ms"), (75.0, "75 s")])
def test_times_have_a_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
