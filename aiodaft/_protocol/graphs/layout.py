"""The picture of a dataflow as rows and lanes, before it has coordinates. Pure, in linear time.

Lane 0 is the controller's, with the inputs at the top and the outputs below their steps; each actor has a lane, in
which its steps stand in their order. A step stands below all values that it needs, so that every arrow leads down.

In large graphs, calls of the same method of one actor in a row, each of which takes only the result of the one before,
are one box with their number. Of more than `MOST_ROWS` rows, the first `FIRST_ROWS` and the last `LAST_ROWS` are shown,
and a band between them for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Final, TypeVar

from aiodaft._protocol.graphs.plan import Dataflow
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.numbers import amount, count

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
        size: The bytes of its encoding.
        seconds: The running time of the step that made it.
    """

    kind: str = ""
    size: int | None = None
    seconds: float | None = None


NO_NOTE: Final = ValueNote()
Notes = Mapping[int, ValueNote]


@dataclass(slots=True)
class Box:
    """An input, an output, or the calls that are drawn as one.

    Attributes:
        title: Such as "Model.execute", "input 0" or "output 1".
        note: Its seconds are those of all calls of the box.
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
    """

    source: Box | None
    target: Box | None
    travels: bool
    size: int | None


@dataclass(slots=True)
class Lane:
    name: str
    steps: int = 0
    seconds: float | None = None


@dataclass(slots=True)
class Layout:
    """The place of everything in the picture.

    Attributes:
        travelled: The bytes that went from process to process, where the size is known.
        band: The row that stands for those that are left out.
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


def listing_of(flow: Dataflow[DataT], notes: Notes) -> str:
    return "\n".join(_lines(flow, notes))


def _lines(flow: Dataflow[DataT], notes: Notes) -> Iterator[str]:
    calls = Counter(step.lane for step in flow.steps)
    yield summary(len(flow.steps), len(calls))
    for (process, name), number in calls.items():
        yield f"  {name} in {process}: {count(number, 'call')}"
    for value in range(flow.inputs):
        yield _line(f"  %{value} = input", "", notes.get(value, NO_NOTE))
    for value, step in enumerate(flow.steps, flow.inputs):
        method = step.label.rpartition(".")[2]
        needs = ", ".join(f"%{need}" for need in step.needs)
        yield _line(f"  %{value} = {step.name}.{method}({needs})", step.line, notes.get(value, NO_NOTE))
    yield f"  return {', '.join(f'%{value}' for value in flow.outputs)}"


def _line(text: str, line: str, note: ValueNote) -> str:
    facts = [value_text(note), "" if note.seconds is None else duration(note.seconds), line.rpartition("/")[2]]
    known = ", ".join(filter(None, facts))
    return f"{text:40}  # {known}" if known else text


def duration(seconds: float) -> str:
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def value_text(note: ValueNote) -> str:
    return " ".join(filter(None, [note.kind, "" if note.size is None else amount(note.size)]))


def summary(steps: int, actors: int) -> str:
    return f"{count(steps, 'call')} to {count(actors, 'actor')}"


# A layout as the text of an SVG file; needs no fonts and no other program. Rows and lanes are a grid. An arrow runs in
# the space between two rows; one that passes rows goes down in the space between two lanes. So no arrow crosses a box.

# Pixels. A character is that wide in the font below.
_CHARACTER: Final = 7.3
_BOX: Final = 50
_GAP: Final = 34
_GUTTER: Final = 44
_HEAD: Final = 94
_MARGIN: Final = 20
_SHORTEST, _LONGEST = 16, 34
_FONT: Final = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12"'
_COLOURS: Final = ("#3b82f6", "#10b981", "#f59e0b", "#a855f7", "#ef4444", "#06b6d4", "#84cc16", "#ec4899")
_GREY, _DARK, _LIGHT = "#64748b", "#0f172a", "#f1f5f9"


def svg_of(layout: Layout) -> str:
    return _Drawing(layout).text()


class _Drawing:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        longest = max(max(len(_title(box)) + len(_time(box)) + 1, len(value_text(box.note))) for box in layout.boxes)
        longest = max(longest, *(len(lane.name) for lane in layout.lanes))
        self._characters = min(max(longest, _SHORTEST), _LONGEST)
        self._wide = round(self._characters * _CHARACTER) + 24
        self._slowest = max((box.note.seconds or 0 for box in layout.boxes), default=0)
        self._coming: dict[int, int] = {}
        for arrow in layout.arrows:
            if arrow.target is not None:
                self._coming[id(arrow.target)] = self._coming.get(id(arrow.target), 0) + 1
        self._came: dict[int, int] = {}

    def text(self) -> str:
        layout = self._layout
        width = 2 * _MARGIN + len(layout.lanes) * (self._wide + _GUTTER)
        height = self._top(layout.rows) + _MARGIN
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" {_FONT} fill="{_DARK}">',
            f'<rect width="{width}" height="{height}" rx="12" fill="#ffffff"/>',
            self._headline(),
            *(self._lane(place, lane, height) for place, lane in enumerate(layout.lanes)),
            *(self._arrow(place, arrow) for place, arrow in enumerate(layout.arrows)),
            *(part for box in layout.boxes for part in self._box(box)),
            *self._band(width),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _left(self, lane: int) -> int:
        return _MARGIN + _GUTTER // 2 + lane * (self._wide + _GUTTER)

    def _middle(self, lane: int) -> float:
        return self._left(lane) + self._wide / 2

    def _top(self, row: int) -> int:
        return _HEAD + row * (_BOX + _GAP)

    def _headline(self) -> str:
        layout, facts = self._layout, list[str]()
        ran = [lane.seconds for lane in layout.lanes if lane.seconds is not None]
        if ran:
            facts.append(f"last run: {duration(sum(ran))} in methods")
        if layout.travelled:
            facts.append(f"{amount(layout.travelled)} between processes")
        more = f'<tspan dx="12" fill="{_GREY}" font-weight="normal">{", ".join(facts)}</tspan>' if facts else ""
        title = summary(layout.steps, len(layout.lanes) - 1)
        return f'<text x="{_MARGIN}" y="26" font-size="14" font-weight="bold">{title}{more}</text>'

    def _lane(self, place: int, lane: Lane, height: int) -> str:
        x, colour = self._left(place) - 10, _colour(place)
        facts = [count(lane.steps, "call")] if place else []
        if lane.seconds is not None:
            facts.append(duration(lane.seconds))
        return (
            f'<g class="lane"><rect x="{x}" y="40" width="{self._wide + 20}" height="{height - 40 - _MARGIN // 2}" '
            f'rx="8" fill="{colour}" fill-opacity="0.06"/><rect x="{x}" y="40" width="{self._wide + 20}" height="4" '
            f'rx="2" fill="{colour}"/><text x="{x + 10}" y="62" font-weight="bold">'
            f"{escape(self._cut(lane.name))}<title>{escape(lane.name)}</title></text>"
            f'<text x="{x + 10}" y="79" fill="{_GREY}">{", ".join(facts)}</text></g>'
        )

    def _box(self, box: Box) -> Iterator[str]:
        x, y, colour = self._left(box.lane), self._top(box.row), _colour(box.lane)
        round_corners = 6 if box.count else _BOX // 2
        yield (
            f'<g class="{"step" if box.count else "value"}"><title>{escape(_tooltip(box))}</title><rect x="{x}" '
            f'y="{y}" width="{self._wide}" height="{_BOX}" rx="{round_corners}" fill="#ffffff" stroke="{colour}"/>'
        )
        if box.note.seconds is not None and self._slowest:
            wide = round((self._wide - 12) * box.note.seconds / self._slowest, 1)
            yield f'<rect class="time" x="{x + 6}" y="{y + _BOX - 7}" width="{wide}" height="3" fill="{colour}"/>'
        time, value = _time(box), value_text(box.note)
        title = self._cut(_title(box), len(time) + 1 if time else 0)
        down = 19 if value else 29
        yield f'<text x="{x + 12}" y="{y + down}" font-weight="bold">{escape(title)}</text>'
        if time:
            end = x + self._wide - 12
            yield f'<text x="{end}" y="{y + down}" text-anchor="end" fill="{colour}">{time}</text>'
        if value:
            yield f'<text x="{x + 12}" y="{y + 35}" fill="{_GREY}">{escape(self._cut(value))}</text>'
        yield "</g>"

    def _band(self, width: int) -> Iterator[str]:
        layout = self._layout
        if layout.band is None:
            return
        x, y = _MARGIN, self._top(layout.band)
        yield (
            f'<g class="band"><rect x="{x}" y="{y}" width="{width - 2 * _MARGIN}" height="{_BOX}" rx="6" '
            f'fill="{_LIGHT}" stroke="{_GREY}" stroke-dasharray="4 4"/><text x="{width / 2}" y="{y + 29}" '
            f'text-anchor="middle" fill="{_GREY}">{count(layout.hidden, "call")} not shown</text></g>'
        )

    def _arrow(self, place: int, arrow: Arrow) -> str:
        source, target = arrow.source, arrow.target
        end = target or source
        assert end is not None
        band = self._layout.band or 0
        from_lane, from_row = (source.lane, source.row) if source else (end.lane, band)
        to_lane, to_row = (target.lane, target.row) if target else (end.lane, band)
        x1, y1 = self._middle(from_lane), self._top(from_row) + _BOX
        x2, y2 = self._middle(to_lane) + (self._port(target) if target else 0), self._top(to_row)
        path = f"M{x1:g} {y1}"
        if to_row > from_row + 1:
            # Down beside the lane of the target, on the side of the source.
            side = 1 if from_lane > to_lane else -1
            beside = self._middle(to_lane) + side * (self._wide + _GUTTER) / 2 + (place % 5 - 2) * 4
            path += _curve(x1, y1, beside, y1 + _GAP) + f" V{y2 - _GAP}"
            x1, y1 = beside, y2 - _GAP
        path += _curve(x1, y1, x2, y2 - 6)
        width = 1.2 if arrow.size is None else 1.2 + min(arrow.size.bit_length(), 40) / 16
        colour, dashes = (_GREY, "") if arrow.travels else ("#94a3b8", ' stroke-dasharray="3 3"')
        known = f"<title>{amount(arrow.size)}</title>" if arrow.size is not None else ""
        return (
            f'<g class="arrow">{known}<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes}/>'
            f'<path d="M{x2 - 4:g} {y2 - 7} L{x2 + 4:g} {y2 - 7} L{x2:g} {y2} Z" fill="{colour}"/></g>'
        )

    def _port(self, box: Box) -> float:
        count, place = self._coming[id(box)], self._came.get(id(box), 0)
        self._came[id(box)] = place + 1
        return (place - (count - 1) / 2) * min(14, self._wide / (count + 1))

    def _cut(self, text: str, less: int = 0) -> str:
        most = self._characters - less
        return text if len(text) <= most else text[: most - 1] + "…"


def _curve(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (y1 + y2) / 2
    return f" C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"


def _colour(lane: int) -> str:
    return _COLOURS[(lane - 1) % len(_COLOURS)] if lane else _GREY


def _title(box: Box) -> str:
    return f"{box.title} x {box.count}" if box.count > 1 else box.title


def _time(box: Box) -> str:
    return "" if box.note.seconds is None else duration(box.note.seconds)


def _tooltip(box: Box) -> str:
    return ", ".join(filter(None, [_title(box), _time(box), value_text(box.note), box.line.rpartition("/")[2]]))
