"""The picture of a dataflow as rows and lanes, before it has coordinates. Pure, in linear time.

Lane 0 is the controller's, with the inputs at the top and the outputs below their steps; each actor has a lane, in
which its steps stand in their order. A step stands below all values that it needs, so that every arrow leads down. A
row has at most one box of each lane.

Two rules keep large graphs readable. Calls of the same method of one actor in a row, each of which takes only the
result of the one before and nothing else of the graph, are one box with their number. Of more than `MOST_ROWS` rows,
the first `FIRST_ROWS` and the last `LAST_ROWS` are shown, and a band between them for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from aiodaft._protocol.graphs.plan import Dataflow
from aiodaft._protocol.ids import PeerId

DataT = TypeVar("DataT")

FIRST_ROWS: Final = 48
LAST_ROWS: Final = 24
MOST_ROWS: Final = FIRST_ROWS + LAST_ROWS + 8
CONTROLLER: Final = 0


@dataclass(frozen=True, slots=True)
class ValueNote:
    """The known facts about a value of a graph.

    Attributes:
        kind: Its type, or dtype and shape, such as "float32[8, 64]".
        size: The bytes of its encoding; None if it is not known.
        seconds: The running time of the step that made it; None if that is not known, and for inputs.
    """

    kind: str = ""
    size: int | None = None
    seconds: float | None = None


NO_NOTE: Final = ValueNote()
# By the number of the value.
Notes = Mapping[int, ValueNote]


@dataclass(slots=True)
class Box:
    """An input, an output, or the calls that are drawn as one.

    Attributes:
        title: Such as "Model.execute", "input 0" or "output 1".
        note: The known facts about the value; its seconds are those of all calls of the box.
        count: The number of calls; 0 for inputs and outputs.
    """

    title: str
    lane: int
    row: int
    process: PeerId | None
    note: ValueNote = NO_NOTE
    count: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A value on its way. One end is None if its box is not shown.

    Attributes:
        travels: Whether it goes from one process to another.
        size: Its bytes, if they are known.
    """

    source: Box | None
    target: Box | None
    travels: bool
    size: int | None


@dataclass(slots=True)
class Lane:
    """An actor, or the controller.

    Attributes:
        seconds: For how long they ran together; None if that is not known.
    """

    name: str
    steps: int = 0
    seconds: float | None = None


@dataclass(slots=True)
class Layout:
    """The place of everything in the picture.

    Attributes:
        travelled: The bytes that went from process to process, of all values whose size is known.
        band: The row that stands for the rows that are left out; None if all are shown.
        hidden: The number of calls that are left out.
    """

    lanes: list[Lane]
    rows: int = 0
    boxes: list[Box] = field(default_factory=list[Box])
    arrows: list[Arrow] = field(default_factory=list[Arrow])
    steps: int = 0
    travelled: int = 0
    band: int | None = None
    hidden: int = 0


def lay_out(flow: Dataflow[DataT], notes: Notes, *, owner: PeerId | None = None) -> Layout:
    layout = Layout([Lane("controller")], steps=len(flow.steps))
    # The box that has a value.
    made: dict[int, Box] = {}
    for number in range(flow.inputs):
        made[number] = Box(f"input {number}", CONTROLLER, number, owner, notes.get(number, NO_NOTE))
    layout.boxes += made.values()
    needed: list[tuple[int, Box]] = []
    _place_steps(flow, notes, layout, made, needed)
    row = flow.inputs
    for position, value in enumerate(flow.outputs):
        row = max(row, made[value].row + 1)
        output = Box(f"output {position}" if len(flow.outputs) > 1 else "output", CONTROLLER, row, owner)
        layout.boxes.append(output)
        needed.append((value, output))
        row += 1
    layout.rows = 1 + max(box.row for box in layout.boxes)
    for value, box in needed:
        layout.arrows.append(
            Arrow(made[value], box, made[value].process != box.process, notes.get(value, NO_NOTE).size)
        )
    moves = {(value, box.process) for value, box in needed if made[value].process != box.process}
    layout.travelled = sum(notes.get(value, NO_NOTE).size or 0 for value, _ in moves)
    if layout.rows > MOST_ROWS:
        _abbreviate(layout)
    return layout


def _place_steps(
    flow: Dataflow[DataT], notes: Notes, layout: Layout, made: dict[int, Box], needed: list[tuple[int, Box]]
) -> None:
    lanes: dict[tuple[PeerId, str], int] = {}
    # The lowest box of each lane, with its value.
    lowest: dict[int, tuple[int, Box]] = {}
    inner = _values_of_one_use(flow)
    for value, step in enumerate(flow.steps, flow.inputs):
        place = lanes.setdefault(step.lane, len(layout.lanes))
        if place == len(layout.lanes):
            layout.lanes.append(Lane(step.name))
        lane, note = layout.lanes[place], notes.get(value, NO_NOTE)
        lane.steps += 1
        lane.seconds = _sum(lane.seconds, note.seconds)
        result, box = lowest.get(place, (-1, None))
        if box is not None and box.title == step.label and result in inner and {*step.needs} == {result}:
            box.count += 1
            box.note = ValueNote(note.kind, note.size, _sum(box.note.seconds, note.seconds))
            made[value], lowest[place] = box, (value, box)
            continue
        above = [made[need].row for need in step.needs]
        row = 1 + max([0 if flow.inputs else -1, *above, -1 if box is None else box.row])
        box = Box(step.label, place, row, step.actor[0], note, 1, step.line)
        layout.boxes.append(box)
        needed += [(need, box) for need in dict.fromkeys(step.needs)]
        made[value], lowest[place] = box, (value, box)


def _values_of_one_use(flow: Dataflow[DataT]) -> set[int]:
    once: set[int] = set()
    again = set(flow.outputs)
    for step in flow.steps:
        for need in set(step.needs):
            (again if need in once else once).add(need)
    return once - again


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


def _abbreviate(layout: Layout) -> None:
    cut = layout.rows - LAST_ROWS
    layout.band = FIRST_ROWS
    layout.hidden = sum(box.count for box in layout.boxes if FIRST_ROWS <= box.row < cut)
    hidden = {id(box) for box in layout.boxes if FIRST_ROWS <= box.row < cut}
    layout.boxes = [box for box in layout.boxes if id(box) not in hidden]
    arrows: list[Arrow] = []
    # A box has one arrow to the band and one from it.
    seen: set[tuple[int, bool]] = set()
    for arrow in layout.arrows:
        starts, ends = id(arrow.source) not in hidden, id(arrow.target) not in hidden
        if starts and ends:
            arrows.append(arrow)
        elif (starts or ends) and (end := (id(arrow.source if starts else arrow.target), starts)) not in seen:
            seen.add(end)
            arrows.append(replace(arrow, target=None) if starts else replace(arrow, source=None))
    layout.arrows = arrows
    for box in layout.boxes:
        if box.row >= cut:
            box.row += FIRST_ROWS + 1 - cut
    layout.rows = FIRST_ROWS + 1 + LAST_ROWS
