"""Listings and Mermaid flowcharts of dataflows: all is there, in the frame of its actor, and large ones are cut."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from dataflows import actor, flows, step
from hypothesis import given, settings

from aiodaft._protocol.graphs.listing import MOST_DRAWN, ValueNote, duration, listing_of, mermaid_of
from aiodaft._protocol.graphs.plan import Dataflow
from aiodaft._protocol.numbers import amount

A, B = actor(0), actor(1)


def test_what_the_runtime_does_beside_an_actor_is_shown_as_its_own() -> None:
    other = actor(0, number=17)
    beside = [replace(step(actor(0, number=3), index), name=step(A if index < 3 else other).name) for index in (2, 3)]
    flow = Dataflow(1, (step(A, 0), step(other, 1), *beside), (4,))
    assert re.findall(r"subgraph .*|\bv[1-9]\[", mermaid_of(flow, {})) == [
        'subgraph a0["A-16 in worker-0"]', "v1[", "v3[", 'subgraph a1["A-17 in worker-0"]', "v2[", "v4[",
    ]  # fmt: skip
    assert listing_of(flow, {}).splitlines()[:3] == [
        "4 calls to 2 actors",
        "  A-16 in worker-0: 2 calls",
        "  A-17 in worker-0: 2 calls",
    ]


@given(flow=flows())
@settings(max_examples=100, deadline=None)
def test_every_call_is_drawn_once_with_an_arrow_from_each_value_that_it_takes(flow: Dataflow[None]) -> None:
    drawn = mermaid_of(flow, {})
    assert re.findall(r"^  +v(\d+)[\[(]", drawn, re.MULTILINE) == [
        *map(str, range(flow.inputs)),
        *(
            str(flow.inputs + index)
            for lane in dict.fromkeys(one.lane for one in flow.steps)
            for index, one in enumerate(flow.steps)
            if one.lane == lane
        ),
    ]
    made = [*["outside"] * flow.inputs, *(one.actor[0] for one in flow.steps)]
    expected = [
        (f"v{need}", "-.->" if made[need] == one.actor[0] else "-->", f"v{value}")
        for value, one in enumerate(flow.steps, flow.inputs)
        for need in dict.fromkeys(one.needs)
    ]
    expected += [(f"v{value}", "-->", f"o{position}") for position, value in enumerate(flow.outputs)]
    assert re.findall(r"(\w+) (-\.?->) (\w+)", drawn) == expected


def test_names_types_and_times_are_in_the_boxes_and_are_escaped() -> None:
    odd = replace(step(A, 0), name='<A> & "B"', label="A.<lambda>")
    flow = Dataflow(1, (odd, step(B, 1)), (2,))
    notes = {0: ValueNote("int"), 1: ValueNote("float32[8, 64]", 2048, 0.25)}
    assert mermaid_of(flow, notes) == (
        "flowchart TB\n"
        '  v0(["input 0<br>int"])\n'
        '  subgraph a0["#60;A#62; #38; #34;B#34; in worker-0"]\n'
        '    v1["A.#60;lambda#62;<br>float32[8, 64] 2 KiB<br>250 ms"]\n'
        "  end\n"
        '  subgraph a1["A-16 in worker-1"]\n'
        '    v2["A.go"]\n'
        "  end\n"
        "  v0 --> v1\n"
        "  v1 --> v2\n"
        '  v2 --> o0(["output"])\n'
    )


def test_of_many_calls_the_first_are_drawn() -> None:
    chain = Dataflow(1, tuple(step((A, B)[index % 2], index) for index in range(2000)), (1, 2000))
    drawn = mermaid_of(chain, {})
    shown = MOST_DRAWN // 2
    assert drawn.count("A.go") == shown
    assert f'more["{2000 - shown:,} calls not shown"]' in drawn
    assert re.findall(r"v\d+ --> o\d", drawn) == ["v1 --> o0"]
    assert not re.search(rf"\bv{shown + 1}\b", drawn)


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
